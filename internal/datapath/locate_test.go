// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netns"

	"github.com/segue-lb/segue/internal/testhost"
)

// named makes a network namespace with a name. inside runs a function in it.
func named(t *testing.T) (path string, inside func(f func())) {
	t.Helper()
	testhost.NeedNamespaces(t)
	name := fmt.Sprintf("test-%d-locate", os.Getpid())
	calls, done := make(chan func()), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		ns, err := netns.NewNamed(name)
		done <- err
		defer ns.Close()
		for f := range calls {
			f()
			done <- nil
		}
	}()
	t.Cleanup(func() {
		close(calls)
		if err := netns.DeleteNamed(name); err != nil {
			t.Error(err)
		}
	})
	must(t, <-done)
	return "/run/netns/" + name, func(f func()) {
		calls <- f
		<-done
	}
}

// TestLocate locates an instance in a network namespace with a name. Its interface has the index of
// another interface here.
func TestLocate(t *testing.T) {
	needRoot(t)
	path, inside := named(t)
	dir := pins(t)
	pin := filepath.Join(dir, LinkPin)
	program := pass(t, ebpf.XDP, 2)
	instance := Instance{filepath.Base(dir), RoleBalancer}
	check := func(where string, want Located) {
		t.Helper()
		want.Instance = instance
		got, err := Locate(instance)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: error %v, -want +got:\n%s", where, err, diff)
		}
	}
	check("not attached", Located{})
	const lo = 1
	inside(func() {
		if _, err := attach(program, lo, pin); err != nil {
			t.Error(err)
		}
		check("in its namespace", Located{Attachment: &Attachment{Ifindex: lo, Interface: "lo", Mode: Generic}})
	})
	check("from outside", Located{Attachment: &Attachment{Ifindex: lo}, Namespace: path})
	must(t, testhost.NewNamespace(t).Do(func() error {
		check("from a third one", Located{Attachment: &Attachment{Ifindex: lo}, Namespace: path})
		return nil
	}))
}
