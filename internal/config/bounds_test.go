// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// doubled returns sections. Each section has times+1 aliases of the section before it.
func doubled(open, element, end string, times, levels int) string {
	var s strings.Builder
	fmt.Fprintf(&s, "a0: &a0 %s\n", open+strings.Repeat(element+", ", times)+element+end)
	for i := 1; i < levels; i++ {
		alias := fmt.Sprintf("*a%d", i-1)
		fmt.Fprintf(&s, "a%d: &a%d %s\n", i, i, "["+strings.Repeat(alias+", ", times)+alias+"]")
	}
	return s.String()
}

// chained returns sections. Each section contains the section before it, by an alias.
func chained(levels int) string {
	var s strings.Builder
	s.WriteString("a0: &a0 {x: 1}\n")
	for i := 1; i < levels; i++ {
		fmt.Fprintf(&s, "a%d: &a%d {x: *a%d}\n", i, i, i-1)
	}
	return s.String()
}

// merged returns mappings. Each mapping merges the mapping before it ten times.
func merged(levels int) string {
	var s strings.Builder
	s.WriteString("a0: &a0 {x: 1}\n")
	for i := 1; i < levels; i++ {
		fmt.Fprintf(&s, "a%d: &a%d {<<: [%s*a%d]}\n", i, i, strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 9), i-1)
	}
	return s.String()
}

// manyServers returns services that all have the same servers.
func manyServers(services, servers int, server string) string {
	return "node: &n {interface: eth0}\nservices:\n- &s {servers: &l [" + strings.Repeat(server+",", servers) + "]}\n" +
		strings.Repeat("- *s\n", services)
}

// A short text cannot stand for a document that takes much memory, however it is read. A long text
// takes memory in proportion to its length, and no more than the largest configuration.
func TestBounds(t *testing.T) {
	const tooLarge = "the file is too large: it may have "
	for name, c := range map[string]struct {
		text   string
		want   string // part of the error
		mostMB uint64 // may be allocated in total
	}{
		"exponential lists":   {doubled("[", "x", "]", 9, 300), "line 6: " + tooLarge, 50},
		"exponential doubles": {doubled("[", "x", "]", 1, 400), "line 16: " + tooLarge + "207040 keys, values, lists and mappings, where an alias counts as all that it stands for", 50},
		"exponential in services": {
			strings.ReplaceAll(doubled("[", "{name: x}", "]", 9, 300), "a299:", "services:"), "line 6: " + tooLarge, 50,
		},
		"quadratic":            {manyServers(1000, 4000, "{}"), "line 88: " + tooLarge, 50},
		"quadratic, in bounds": {manyServers(15, 3000, "{}"), "these are the first 1000 errors", 375},
		"quadratic, unknown":   {manyServers(10, 3000, "{a: b}"), "these are the first 1000 errors", 375},
		"quadratic merge keys": {"a: &a {" + strings.Repeat("x: 1, ", 1500) + "}\nb: {<<: [" + strings.Repeat("*a, ", 1500) + "]}\n", "line 2: " + tooLarge, 50},
		"exponential merges":   {merged(200), "line 6: " + tooLarge, 50},
		"long text":            {"a: &a " + strings.Repeat("x", 64<<10) + "\nb: [" + strings.Repeat("*a, ", 2000) + "]\n", "line 2: the values of the file have more than 33554432 bytes", 50},
		"flow depth":           {"a: " + strings.Repeat("[", 13<<10), "line 1: more than 100 levels of lists and mappings", 50},
		"mapping depth":        {strings.Repeat("{a: ", 13<<10), "line 1: more than 100 levels of lists and mappings", 50},
		"block depth":          {strings.Repeat("- ", 13<<10), "line 1: more than 100 levels of lists and mappings", 50},
		"depth by aliases":     {chained(500), "line 100: more than 100 levels of lists and mappings, where an alias", 50},
		"itself":               {"a: &a [b, *a]\n", "line 1: the alias *a stands for a value that contains the alias", 50},
		"itself in a key":      {"? &a {*a : b}\n: c\n", "line 1: the alias *a stands for a value that contains the alias", 50},
		"each other":           {"a: &a\n  b: &b [*a]\n  c: *b\n", "line 2: the alias *a stands for a value that contains the alias", 50},
		"huge number":          {"node: {seed: " + strings.Repeat("9", 13<<10) + "}\n", "line 1: node.seed: must be", 50},
		"directives":           {strings.Repeat("%TAG !a! x\n", 1000), "line 11: more than 10 directives", 50},
		"long flow list":       {"services: [" + strings.Repeat("1,", 15<<20) + "1]\n", "line 1: " + tooLarge, 200},
		"long block list":      {"services:\n" + strings.Repeat("-\n", 15<<20), "line 1000001: " + tooLarge, 200},
		"long mapping":         {"node: {" + strings.Repeat("a,", 15<<20) + "}\n", "line 1: " + tooLarge, 200},
		"list of mappings":     {"services: [" + strings.Repeat("{},", 100_001) + "]\n", "services: has 100001 elements; at most 100000 are read", 500},
		"long file":            {strings.Repeat("#", 32<<20+1), "the file has 33554433 bytes; at most 33554432 are read", 50},
		"many errors":          {"node: {" + strings.Repeat("a: 1,\n", 20_000) + "}\n", "line 1000: these are the first 1000 errors", 50},
	} {
		t.Run(name, func(t *testing.T) { checkBounded(t, []byte(c.text), c.want, c.mostMB) })
	}
}

// checkBounded reads a text as each kind of file. Each read may allocate at most mostMB. As a
// balancer's file, the text causes the wanted error.
func checkBounded(t *testing.T, text []byte, want string, mostMB uint64) {
	t.Helper()
	for role, parse := range map[string]func([]byte) error{
		"balancer": func(text []byte) error { _, _, err := ParseBalancer(text); return err },
		"agent":    func(text []byte) error { _, _, err := ParseAgent(text); return err },
		"kind":     func(text []byte) error { _, err := KindOf(text); return err },
		"overrides": func(text []byte) error {
			_, err := ParseOverrides([]byte("overrides: [{service: web, set: {a: &z []}}]\n" + string(text)))
			return err
		},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := parse(text)
		runtime.ReadMemStats(&after)
		if allocated := (after.TotalAlloc - before.TotalAlloc) >> 20; allocated > mostMB {
			t.Errorf("%s: %d MB were allocated for %d bytes, want at most %d", role, allocated, len(text), mostMB)
		}
		if role == "balancer" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.300s\nwant %s", fmt.Sprint(err), want)
		}
	}
}
