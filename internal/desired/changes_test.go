// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// Servers are equal if all their fields are equal. Weights are compared by their values.
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

// Services with the same revision count as equal. All others are compared.
func TestDiffering(t *testing.T) {
	of := func(name string, port Port) Service {
		return Service{Name: name, Port: port, Revision: new(Revision)}
	}
	before := []Service{of("same", 1), of("read again", 1), of("changed", 1), of("goes", 1)}
	now := []Service{of("comes", 1), of("same", 2), of("read again", 1), of("changed", 2)}
	now[1].Revision = before[0].Revision
	names := func(services []*Service) (all []string) {
		for _, s := range services {
			all = append(all, s.Name)
		}
		return all
	}
	for shift := range now { // the places do not matter
		now = slices.Concat(now[shift:], now[:shift])
		changed, former := Differing(now, before)
		got, want := names(changed), []string{"changed", "comes"}
		slices.Sort(got)
		if !slices.Equal(got, want) || !slices.Equal(names(former), []string{"changed", "goes"}) {
			t.Errorf("got %v, want %v; former %v", got, want, names(former))
		}
	}
}
