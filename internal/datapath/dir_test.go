// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/testhost"
)

func needRoot(t *testing.T) {
	t.Helper()
	testhost.NeedBPF(t)
}

// TestNamesStayInside uses names that lead out of the pins' directory.
func TestNamesStayInside(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	must(t, os.Mkdir(victim, 0o700))
	for _, name := range []string{"", "..", "../../../.." + victim} {
		// RemoveDir would remove the directory of a wrongly accepted name, so it gets only a
		// harmless name.
		if _, err := MakeDir(name, RoleBalancer); err == nil {
			t.Errorf("made a directory for %q", name)
		}
	}
	if err := RemoveDir("../../../.." + victim); err == nil {
		t.Error("removed a directory outside")
	}
	if _, err := os.Stat(victim); err != nil {
		t.Error(err)
	}
}

// TestInstancesComeAndGo starts instances while others end and remove the shared parent directory.
func TestInstancesComeAndGo(t *testing.T) {
	needRoot(t)
	var group sync.WaitGroup
	for i := range 3 {
		group.Go(func() {
			instance := fmt.Sprintf("test-%d-%d", os.Getpid(), i)
			for range 2000 {
				if _, err := MakeDir(instance, RoleAgent); err != nil {
					t.Error(err)
					return
				}
				if err := RemoveDir(instance); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
}

func pinnedMap(t *testing.T, dir, name string) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(t, err)
	defer m.Close()
	must(t, m.Pin(filepath.Join(dir, name)))
}

func TestCheckRole(t *testing.T) {
	needRoot(t)
	for _, c := range []struct{ role, not Role }{{RoleBalancer, RoleAgent}, {RoleAgent, RoleBalancer}} {
		instance := fmt.Sprintf("test-%d-%s", os.Getpid(), c.role)
		if err := CheckRole(instance, c.role); err == nil || !strings.Contains(err.Error(), "no instance") {
			t.Errorf("an instance that does not exist: error %v", err)
		}
		dir, err := MakeDir(instance, c.role)
		must(t, err)
		t.Cleanup(func() {
			if err := RemoveDir(instance); err != nil {
				t.Error(err)
			}
		})
		if err := CheckRole(instance, c.role); err == nil {
			t.Errorf("an empty directory is taken for a %s", c.role)
		}
		pinnedMap(t, dir, marks[c.role])
		if err := CheckRole(instance, c.role); err != nil {
			t.Error(err)
		}
		if err := CheckRole(instance, c.not); err == nil || !strings.Contains(err.Error(), "does not have the role "+string(c.not)) {
			t.Errorf("a %s is taken for a %s: error %v", c.role, c.not, err)
		}
		if _, err := MakeDir(instance, c.role); err != nil {
			t.Error(err)
		}
		_, err = MakeDir(instance, c.not)
		if want := fmt.Sprintf("instance %q has the role %s", instance, c.role); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a %s starts as a %s: error %v, want %q", c.role, c.not, err, want)
		}
	}
}
