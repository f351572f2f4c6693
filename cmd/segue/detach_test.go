// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestDetachRefuses checks that detach refuses a name that is not an instance of its role, before
// it locks or removes anything.
func TestDetachRefuses(t *testing.T) {
	for _, role := range []string{"lb", "agent"} {
		for name, want := range map[string]string{
			"":                 "letters, digits",
			"..":               "letters, digits",
			"../../../../tmp":  "letters, digits",
			"no-such-instance": "",
		} {
			_, err := runSegue(t.Context(), role, "detach", name)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("segue %s detach %q: error %v, want %q", role, name, err, want)
			}
		}
	}
}

// TestDetachTells checks that the command prints what it has detached, and from which interfaces.
func TestDetachTells(t *testing.T) {
	testhost.NeedBPF(t)
	ns, peer := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, ns, "eth0", nil, peer, "eth0", nil)
	testhost.Connect(t, ns, "eth1", nil, peer, "eth1", nil)
	both := map[string]string{datapath.LinkPin: "eth0", datapath.InsidePin: "eth1"}
	for want, links := range map[string]map[string]string{
		", which was not attached to an interface": nil,
		" from eth0 and eth1":                      both,
	} {
		instance := fmt.Sprintf("test-%d-detach", os.Getpid())
		pinBalancer(t, ns, instance, links)
		var output bytes.Buffer
		root := newRoot()
		root.SetOut(&output)
		root.SetArgs([]string{"lb", "detach", instance})
		testhost.Must(t, ns.Do(root.Execute))
		want = fmt.Sprintf("Detached balancer %q%s.\n", instance, want)
		if output.String() != want {
			t.Errorf("the command prints %q, want %q", output.String(), want)
		}
	}
	elsewhere := []*datapath.Attachment{{Ifindex: 7}}
	const want = " from #7 in another network namespace"
	if got := describeDetached(elsewhere); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// pinBalancer pins the objects by which a balancer is recognised, and its links to the interfaces
// of the namespace.
func pinBalancer(
	t *testing.T, ns *testhost.Namespace, instance string, links map[string]string,
) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		testhost.Must(t, err)
	}
	dir, err := datapath.MakeDir(instance, datapath.RoleBalancer)
	must(err)
	t.Cleanup(func() { _ = datapath.RemoveDir(instance) })
	for _, name := range []string{"identity", "flows"} {
		m, err := ebpf.NewMap(&ebpf.MapSpec{
			Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1,
		})
		must(err)
		defer m.Close()
		must(m.Pin(filepath.Join(dir, name)))
	}
	const xdpPass = 2 // enum xdp_action
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
	})
	must(err)
	defer program.Close()
	must(ns.Do(func() error {
		for pin, name := range links {
			iface, err := netlink.LinkByName(name)
			must(err)
			l, err := link.AttachXDP(link.XDPOptions{
				Program: program, Interface: iface.Attrs().Index,
			})
			must(err)
			defer l.Close()
			must(l.Pin(filepath.Join(dir, pin)))
		}
		return nil
	}))
}
