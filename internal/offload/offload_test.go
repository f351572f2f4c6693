// SPDX-License-Identifier: Apache-2.0

package offload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testnet"
)

// Offloads are switched off and on again, and all others stay as they are.
func TestSet(t *testing.T) {
	t.Parallel()
	a, b := testnet.New(t), testnet.New(t)
	testnet.Connect(t, a, "eth0", nil, b, "eth0", nil)
	all := append([]string{GSO, Checksum, "rx-vlan-hw-parse", "absent"}, TSO...)
	testnet.Must(t, a.Do(func() error {
		before, err := Active("eth0", all...)
		if err != nil || !slices.Contains(before, GSO) || slices.Contains(before, "absent") {
			return fmt.Errorf("on from the beginning: %v, error %w", before, err)
		}
		for _, on := range []bool{false, true} {
			want := before
			if !on {
				want = slices.DeleteFunc(slices.Clone(before), func(o string) bool {
					return o == GSO || slices.Contains(TSO, o)
				})
			}
			err := Set("eth0", on, slices.Concat(TSO, []string{GSO})...)
			got, failed := Active("eth0", all...)
			if diff := cmp.Diff(want, got); diff != "" || err != nil || failed != nil {
				t.Errorf("%v: errors %v, %v; -want +got:\n%s", on, err, failed, diff)
			}
		}
		return nil
	}))
}

// An offload that stays as it is is an error, as is an interface or an offload that does not exist.
func TestSetFails(t *testing.T) {
	t.Parallel()
	testnet.Must(t, testnet.New(t).Do(func() error {
		const fixed = Checksum
		if err := Set("lo", false, fixed); err == nil || !strings.Contains(err.Error(), "switch "+fixed+" of lo off") {
			t.Errorf("fixed: error %v", err)
		}
		if err := Set("absent", false, GRO); !errors.Is(err, unix.ENODEV) {
			t.Errorf("no such interface: error %v", err)
		}
		if _, err := Active("absent", GRO); !errors.Is(err, unix.ENODEV) {
			t.Errorf("no such interface: error %v", err)
		}
		if err := Set("lo", false, "absent"); err == nil {
			t.Error("no error about an offload that does not exist")
		}
		return nil
	}))
}
