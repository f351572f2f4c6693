// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
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
			"line 3: the [ of line 2 must continue here with a comma, or end with ]"},
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
		err := Decode([]byte(text), &file, func() fieldpath.Errors { return nil })
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%q:\n got %s\nwant %s", test.text, got, test.want)
		}
	}
}

// TestFilesThatAreNoConfiguration has files that are not one YAML document in UTF-8, or that have
// YAML that is not supported. Each causes one error with its line.
func TestFilesThatAreNoConfiguration(t *testing.T) {
	in := func(from, to string) string {
		if !strings.Contains(validBalancer, from) {
			t.Fatalf("the valid file has no %q", from)
		}
		return strings.Replace(validBalancer, from, to, 1)
	}
	encoded := func(order binary.AppendByteOrder, text string) string {
		var out []byte
		for _, unit := range utf16.Encode([]rune(text)) {
			out = order.AppendUint16(out, unit)
		}
		return string(out)
	}
	const second = "a second YAML document begins here; the file must hold one"
	const tab = "a tab indents this line: YAML takes only spaces there"
	const open = "a quoted text begins in this line, and has no closing "
	lines := strings.Count(validBalancer, "\n")
	at := func(text string) int { // the line of a text
		return 1 + strings.Count(validBalancer[:strings.Index(validBalancer, text)], "\n")
	}
	for _, test := range []struct {
		name, text string
		line       int
		problem    string
	}{
		{"UTF-16", encoded(binary.LittleEndian, "\ufeff"+validBalancer), 1, "the file is UTF-16; it must be UTF-8"},
		{"UTF-16 without mark", encoded(binary.BigEndian, validBalancer), 1, "the file is UTF-16; it must be UTF-8"},
		{"UTF-32", "\xff\xfe\x00\x00n\x00\x00\x00", 1, "the file is UTF-32; it must be UTF-8"},
		{"Latin-1", in("name: web", "name: w\xe9b"), at("name: web"), "the file is not UTF-8: it has the byte 0xe9 here"},
		{"binary", "\x7fELF\x02\x01\x01\x00\x00", 1, "the file is binary: it has a zero byte here; it must be text"},
		{"zero byte", in("name: web", "name: w\x00b"), at("name: web"), "the file is binary: it has a zero byte here; it must be text"},
		{"control character", in("name: web", "name: w\x07b"), at("name: web"),
			"the file has the control character U+0007 here; it must be text"},
		{"two documents", validBalancer + "---\n" + validBalancer, lines + 1, second},
		{"two documents with marks", "%TAG ! tag:example.com,2000:\n# first\n---\n" + validBalancer + "--- # second\nnode: {}\n", lines + 4, second},
		{"a document after the end", validBalancer + "...\n\n# second\nnode: {}\n", lines + 4, second},
		{"empty second document", "---\n---\n", 2, second},
		{"tab before a field", in("    port: 80", "\tport: 80"), at("    port: 80"), tab},
		{"tab before an element", in("      - {name: s1", "\t- {name: s1"), at("      - {name: s1"), tab},
		{"tab after spaces", in("    port: 80", "  \tport: 80"), at("    port: 80"), tab},
		{"double quote", in("name: web", `name: "web`), at("name: web"), open + `"`},
		{"single quote", in("name: web", "name: 'web"), at("name: web"), open + "'"},
		{"quote in a list", in("- {name: s1", `- {name: "s1`), at("- {name: s1"), open + `"`},
		{"quote before others", in("name: web", `name: "web`) + "# \"\nother: \"x\"\n", at("name: web"), open + `"`},
		{"quote in a mapping", "node: {instance: \"lb, interface: \"eth0\"}\n", 1, open + `"`},
		{"escaped quote", `node: {instance: "a\"b", interface: 'it''s', x: "y}` + "\n", 1, open + `"`},
		{"reserved character", in("name: web", "name: @web"), at("name: web"),
			`"@web" must be in quotes: YAML reserves its first character`},
		{"list of fields", in("    vip:", "   vip:"), at("    vip:"),
			"wrong indentation: the list of line 10 must continue here with a -, or end"},
		{"open bracket", "node: {instance: lb,\nservices: [\n", 3, "a value is missing here, or a bracket before it is not closed"},
		{"later version", "%YAML 1.3\n---\n" + validBalancer, 1,
			`"%YAML 1.3": this directive is not read: remove the line, no file needs one`},
		{"version without a number", "# first\n%YAML\n---\n" + validBalancer, 2,
			`"%YAML": this directive is not read: remove the line, no file needs one`},
		{"unknown directive", "%FOO x\n---\n" + validBalancer, 1,
			`"%FOO x": this directive is not read: remove the line, no file needs one`},
		{"unknown anchor", in("name: web", "name: *w"), at("name: web"),
			"the alias *w stands for nothing: no value before it has the anchor &w"},
		{"second colon", in("name: web", "name: web: x"), at("name: web"),
			"no field can begin here: indent the line as the one before, or put a value with a colon in quotes"},
	} {
		_, _, err := ParseBalancer([]byte(test.text))
		want := fmt.Sprintf("line %d: %s", test.line, test.problem)
		if got := fmt.Sprint(err); got != want {
			t.Errorf("%s:\n got %s\nwant %s", test.name, got, want)
		}
	}
	if _, _, err := ParseBalancer([]byte("\ufeff# café\n---\n" + validBalancer + "...\n# \"\n")); err != nil {
		t.Errorf("a byte order mark, and marks of one document: %v", err)
	}
}

// TestMistypedFields has fields whose names are nearly right, and a merge key. Each causes only one
// error: an error about the missing field would be a consequence.
func TestMistypedFields(t *testing.T) {
	const merge = "merge keys are not read: write the fields out, or use an alias for a whole value"
	for _, test := range []struct{ from, to, want string }{
		{"services:", "service:", "service: unknown field; did you mean services?"},
		{"node:", "nodes:", "nodes: unknown field; did you mean node?"},
		{"    servers:", "    severs:", "services[0].severs: unknown field; did you mean servers?"},
		{"name: web", "nmae: web", "services[0].nmae: unknown field; did you mean name?"},
		{"port: 80", "Port: 80", "services[0].Port: unknown field; did you mean port?"},
		{"port: 80", "<<: {port: 80}", `services[0]."<<": ` + merge},
		{"port: 80", "port:80", "a space must follow the colon after port"},
	} {
		text := strings.Replace(validBalancer, test.from, test.to, 1)
		_, _, err := ParseBalancer([]byte(text))
		if got := fmt.Sprint(err); !strings.HasSuffix(got, ": "+test.want) || strings.Contains(got, "\n") {
			t.Errorf("%s: %v, want %s", test.to, err, test.want)
		}
	}
	// Whether a service of an agent hunts depends on a field that is mistyped.
	agent := strings.Replace(validAgent, "mtu: 1500", "balancers: [\"fd00:6c::/32\"]", 1)
	agent = strings.Replace(agent, "protocol: tcp", "protocol: tcp\n    accept: {policy: always}", 1)
	for _, test := range []struct{ from, to, want string }{
		{"services:", "servces:", "servces: unknown field; did you mean services?"},
		{"protocol: tcp", "protocl: tcp", "services[0].protocl: unknown field; did you mean protocol?"},
		{"protocol: tcp", "protocol: tpc", `services[0].protocol "tpc": must be one of: tcp, udp`},
	} {
		_, _, err := ParseAgent([]byte(strings.Replace(agent, test.from, test.to, 1)))
		if got := fmt.Sprint(err); !strings.HasSuffix(got, ": "+test.want) || strings.Contains(got, "\n") {
			t.Errorf("%s: %v, want %s", test.to, err, test.want)
		}
	}
	// If the file has the correct field, too, the error does not suggest it.
	_, _, err := ParseBalancer([]byte(strings.Replace(validBalancer, "port: 80", "port: 80\n    Port: 81", 1)))
	if got := fmt.Sprint(err); !strings.Contains(got, "Port: unknown field; must be one of: name, vip, vips, port, ports, ") {
		t.Errorf("both fields: %v", err)
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
