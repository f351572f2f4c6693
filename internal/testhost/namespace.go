// SPDX-License-Identifier: Apache-2.0

package testhost

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/netdev"
)

// Namespace is a network namespace without a name. It ends with the test.
type Namespace = netdev.Namespace

// NewNamespace makes a network namespace whose loopback interface is up. It skips the test if the
// user may not make one.
func NewNamespace(t testing.TB) *Namespace {
	t.Helper()
	NeedNamespaces(t)
	n, err := netdev.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n
}

// Prefixes parses addresses with prefix lengths, as Connect takes them.
func Prefixes(all ...string) (out []netip.Prefix) {
	for _, p := range all {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// Connect connects two namespaces by a veth pair. Both ends are up and have the given names and
// addresses.
func Connect(t testing.TB, a *Namespace, aName string, aAddrs []netip.Prefix, b *Namespace, bName string, bAddrs []netip.Prefix) {
	t.Helper()
	ends := []netdev.End{
		{Namespace: a, Name: aName, Addresses: aAddrs},
		{Namespace: b, Name: bName, Addresses: bAddrs},
	}
	if err := netdev.Connect(ends[0], ends[1], 1); err != nil {
		t.Fatal(err)
	}
}
