// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// TestMistakesInYAML has unquoted addresses that YAML misreads, and fields without a space. Each
// causes one error, in terms of the file. If YAML reads what the author meant, there is no error.
func TestMistakesInYAML(t *testing.T) {
	const quotes = "must be in quotes: " +
		"YAML reads the colon at its end as the end of a field name"
	for _, test := range []struct{ text, want string }{
		{"vip: 2001:db8::1", ""},
		{"vip: ::1", ""},
		{`vip: "2001:db8::"`, ""},
		{"locator: fd00:6c:0:1::/64", ""},
		{"locators: [fd00:6c:0:1::/64, fd00:6c::/32]", ""},
		{"{vip: 2001:db8::1, port: 80, locator: fd00:6c:0:1::/64}", ""},
		{"vip: 2001:db8::", `line 2: "2001:db8::" ` + quotes},
		{"vip: 2001:db8:: # of the web", `line 2: "2001:db8::" ` + quotes},
		{"vip: 2001:db8::\r", `line 2: "2001:db8::" ` + quotes},
		{"port: 80\n  vip: 2001:db8::\n  locator: fd00::/64", `line 3: "2001:db8::" ` + quotes},
		{`{locator: "fd00::/64", vip: 2001:db8::, port: 80}`, `line 2: "2001:db8::" ` + quotes},
		{"{vip: 2001:db8::}", `line 2: "2001:db8::" ` + quotes},
		{"{port: 80,\n    vip: 2001:db8::,\n    locator: fd00::/64}",
			`line 3: "2001:db8::" ` + quotes},
		{"addresses: [192.0.2.1, 2001:db8::]", `line 2: node.addresses[1] "2001:db8::": ` + quotes},
		{"addresses:\n    - 2001:db8::", `line 3: node.addresses[0] "2001:db8::": ` + quotes},
		{"vip: [2001:db8::]", "line 2: node.vip: must be a single value, not a list or a mapping"},
		{"listen: [::1]:9188", `line 2: "[::1]:9188" must be in quotes: ` +
			"YAML reads the bracket as the beginning of a list"},
		{"{port: 80, listen: [2001:db8::1]:9188}",
			`line 2: "[2001:db8::1]:9188" must be in quotes: ` +
				"YAML reads the bracket as the beginning of a list"},
		{"port:80\n  vip: 2001:db8::1", "line 3: a space must follow the colon after port"},
		{"vip: 2001:db8::1\n  port:80", "line 4: a space must follow the colon after port"},
		{"{port:80}", `line 2: node."port:80": a space must follow the colon after port`},
		{`{"port:": 80}`, `line 2: node."port:": a space must follow the colon after port`},
		// For other mistakes, the error is that of YAML's reader.
		{"vip: [2001:db8::1",
			"line 3: while parsing a flow sequence: did not find expected ',' or ']'"},
	} {
		var file struct {
			Node struct {
				desired.Service `yaml:",inline"`
				Listen          string   `yaml:"listen"`
				Locator         string   `yaml:"locator"`
				Locators        []string `yaml:"locators"`

				Addresses []string `yaml:"addresses"`
			} `yaml:"node"`
			Other string `yaml:"other"`
		}
		text := "node:\n  " + test.text + "\nother: x\n"
		err := Decode([]byte(text), &file, func() field.Errors { return nil })
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%q:\n got %s\nwant %s", test.text, got, test.want)
		}
	}
}

// TestBoundsOfNumbers has numbers out of the range of their field or of its type, and values that
// are not numbers. The errors have the same form.
func TestBoundsOfNumbers(t *testing.T) {
	for _, test := range []struct{ field, path, from, to, want string }{
		{"weight", "services[0].servers[1].weight", "weight: 1000", "weight: ", "0 to 1000"},
		{"health port", "services[0].health.http.port", "port: 8080", "port: ", "1 to 65535"},
		{"rise", "services[0].health.rise", "rise: 1", "rise: ", "1 to 1000"},
		{"flows", "node.limits.flows", "flows: 1024", "flows: ", "1024 to 100000000"},
	} {
		for _, value := range []string{
			"-1", "100000001", "4294967296", "99999999999999999999", "0.5", "many", "0x",
		} {
			text := strings.Replace(validBalancer, test.from, test.to+value, 1)
			_, _, err := ParseBalancer([]byte(text))
			want := test.path + ` "` + value + `": must be a whole number from ` + test.want
			got := fmt.Sprint(err)
			if !strings.HasSuffix(got, want) || strings.Contains(got, "\n") {
				t.Errorf("%s %s: %v, want %s", test.field, value, err, want)
			}
		}
	}
}
