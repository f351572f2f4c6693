// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/testhost"
)

// Offloads are switched off and on again, and all others stay as they are.
func TestSetOffloads(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "eth0", nil)
	all := append([]string{netdev.GSO, netdev.Checksum, "rx-vlan-hw-parse", "absent"}, netdev.TSO...)
	testhost.Must(t, a.Do(func() error {
		before, err := netdev.ActiveOffloads("eth0", all...)
		if err != nil || !slices.Contains(before, netdev.GSO) || slices.Contains(before, "absent") {
			return fmt.Errorf("on from the beginning: %v, error %w", before, err)
		}
		for _, on := range []bool{false, true} {
			want := before
			if !on {
				want = slices.DeleteFunc(slices.Clone(before), func(o string) bool {
					return o == netdev.GSO || slices.Contains(netdev.TSO, o)
				})
			}
			err := netdev.SetOffloads("eth0", on, slices.Concat(netdev.TSO, []string{netdev.GSO})...)
			got, failed := netdev.ActiveOffloads("eth0", all...)
			if diff := cmp.Diff(want, got); diff != "" || err != nil || failed != nil {
				t.Errorf("%v: errors %v, %v; -want +got:\n%s", on, err, failed, diff)
			}
		}
		return nil
	}))
}

// It is an error if an offload cannot change, or if the interface or the offload does not exist.
func TestSetOffloadsFails(t *testing.T) {
	t.Parallel()
	testhost.Must(t, testhost.NewNamespace(t).Do(func() error {
		const fixed = netdev.Checksum
		if err := netdev.SetOffloads("lo", false, fixed); err == nil || !strings.Contains(err.Error(), "switch "+fixed+" of lo off") {
			t.Errorf("fixed: error %v", err)
		}
		if err := netdev.SetOffloads("absent", false, netdev.GRO); !errors.Is(err, unix.ENODEV) {
			t.Errorf("no such interface: error %v", err)
		}
		if _, err := netdev.ActiveOffloads("absent", netdev.GRO); !errors.Is(err, unix.ENODEV) {
			t.Errorf("no such interface: error %v", err)
		}
		if err := netdev.SetOffloads("lo", false, "absent"); err == nil {
			t.Error("no error about an offload that does not exist")
		}
		return nil
	}))
}
