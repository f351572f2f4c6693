// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"reflect"
	"testing"
)

// Servers are equal if all their fields are, also those that pointers point to.
func TestServerEquals(t *testing.T) {
	weight := func() *uint32 { return new(uint32(3)) }
	server := Server{Name: "s1", Weight: weight()}
	if !server.equals(Server{Name: "s1", Weight: weight()}) {
		t.Error("equal servers differ")
	}
	values := map[reflect.Type]any{
		reflect.TypeFor[string]():       "other",
		reflect.TypeFor[bool]():         true,
		reflect.TypeFor[netip.Addr]():   netip.MustParseAddr("2001:db8::1"),
		reflect.TypeFor[netip.Prefix](): netip.MustParsePrefix("2001:db8::/64"),
		reflect.TypeFor[*uint32]():      new(uint32(4)),
	}
	for i := range reflect.TypeFor[Server]().NumField() {
		other := server
		field := reflect.ValueOf(&other).Elem().Field(i)
		field.Set(reflect.ValueOf(values[field.Type()]))
		if server.equals(other) || other.equals(server) {
			t.Errorf("servers with another %s are equal", reflect.TypeFor[Server]().Field(i).Name)
		}
	}
	if none := (Server{Name: "s1"}); server.equals(none) || none.equals(server) {
		t.Error("servers with and without a weight are equal")
	}
}
