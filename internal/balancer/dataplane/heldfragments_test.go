// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
)

// XDP of a bond in native mode runs on a member, and says the number of the member. A held fragment
// from there belongs to the side of the bond. Here a bridge stands for the bond, because not all
// kernels have bonds.
func TestFragmentsFromAMember(t *testing.T) {
	t.Parallel()
	host, fabric := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, fabric, "to-host", nil, host, "member", nil)
	testhost.Must(t, host.Do(func() error {
		bond := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bond"}}
		if err := netlink.LinkAdd(bond); err != nil {
			return err
		}
		member, err := netlink.LinkByName("member")
		if err != nil {
			return err
		}
		const other = 1000
		arrivals := []arrival{{other, datapath.Native}, {bond.Index, datapath.Native}}
		if side, err := sideOf(arrivals, member.Attrs().Index); err == nil {
			t.Errorf("an interface without a program is on side %d", side)
		}
		if err := netlink.LinkSetMaster(member, bond); err != nil {
			return err
		}
		if side, err := sideOf(arrivals, member.Attrs().Index); side != 1 || err != nil {
			t.Errorf("the member is on side %d, error %v", side, err)
		}
		if side, err := sideOf(arrivals, other); side != 0 || err != nil {
			t.Errorf("an interface with a program: side %d, error %v", side, err)
		}
		return nil
	}))
}
