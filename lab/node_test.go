// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// The namespaces of a lab can be removed even if `ip netns add` runs for the first time meanwhile.
func TestNamespacesBesideIP(t *testing.T) {
	testhost.NeedNamespaces(t)
	runtime.LockOSThread() // and never unlock it: the thread gets another mount namespace
	for _, err := range []error{
		unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS),
		unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""),
		unix.Mount("none", "/run", "tmpfs", 0, ""), // without named namespaces
	} {
		testhost.Must(t, err)
	}
	n := &Node{Spec: Spec{Name: "client"}, lab: &Lab{Name: "besideip"}}
	testhost.Must(t, n.createNamespace())
	if out, err := exec.CommandContext(t.Context(), "ip", "netns", "add", "other").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := deleteNamespace(n.namespace()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(n.namespacePath()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the removal: %v", err)
	}
}
