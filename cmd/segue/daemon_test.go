// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestHangupWhileStarting checks that a SIGHUP during the start reaches the daemon.
func TestHangupWhileStarting(t *testing.T) {
	cmd := &cobra.Command{}
	logFlag(cmd)
	cmd.SetContext(t.Context())
	err := runDaemon(cmd, func(_ context.Context, f *foreground) error {
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			return err
		}
		<-f.hangups
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestLockOfRefusedStart checks that a first start that is refused leaves no lock file.
func TestLockOfRefusedStart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("locks of instances need root")
	}
	const node = "node: {instance: %s, interface: absent, locator: \"fd00:6c:0:1::/64\"}\n"
	const service = "services: [{name: web, vip: 198.51.100.1, port: 80, protocol: tcp%s}]\n"
	for role, servers := range map[string]string{
		"lb": ", servers: [{name: s1, locator: \"fd00:5:0:1::/64\"}]", "agent": "",
	} {
		instance := fmt.Sprintf("test-%d-refused-%s", os.Getpid(), role)
		path := filepath.Join(t.TempDir(), role+".yaml")
		testhost.Must(t, os.WriteFile(path, fmt.Appendf(nil, node+service, instance, servers), 0o600))
		_, err := runSegue(t.Context(), role, "-c", path)
		if _, stays := os.Stat(rundir.LockFile(instance)); err == nil || !errors.Is(stays, os.ErrNotExist) {
			t.Errorf("%s: error %v; the lock: %v", role, err, stays)
			_ = os.Remove(rundir.LockFile(instance))
		}
	}
}

// TestLockOfDataPathStays checks that the lock file stays if the instance has a data path.
func TestLockOfDataPathStays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("locks of instances need root")
	}
	instance := fmt.Sprintf("test-%d-stays", os.Getpid())
	lock, err := rundir.Lock(instance)
	if err == nil {
		_, err = datapath.MakeDir(instance, datapath.RoleBalancer)
	}
	testhost.Must(t, err)
	unlockInstance(lock, instance)
	if _, err := os.Stat(rundir.LockFile(instance)); err != nil {
		t.Errorf("the file does not stay: %v", err)
	}
	if lock, err = rundir.Lock(instance); err != nil {
		t.Fatalf("the lock is still held: %v", err)
	}
	_ = lock.Close()
	if err := errors.Join(os.Remove(rundir.LockFile(instance)), datapath.RemoveDir(instance)); err != nil {
		t.Error(err)
	}
}

// TestRunningAlready checks that a start of an instance that already runs names the setting for a
// second instance.
func TestRunningAlready(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("locks of instances need root")
	}
	instance := fmt.Sprintf("test-%d-running", os.Getpid())
	lock, err := rundir.Lock(instance)
	testhost.Must(t, err)
	defer func() {
		if err := rundir.Unlock(lock); err != nil {
			t.Error(err)
		}
	}()
	const node = "node: {instance: %s, interface: lo, locator: \"fd00:6c:0:1::/64\"}\n"
	const service = "services: [{name: web, vip: 198.51.100.1, port: 80, protocol: tcp%s}]\n"
	for role, servers := range map[string]string{
		"lb": ", servers: [{name: s1, locator: \"fd00:5:0:1::/64\"}]", "agent": "",
	} {
		path := filepath.Join(t.TempDir(), role+".yaml")
		file := fmt.Sprintf(node+service, instance, servers)
		testhost.Must(t, os.WriteFile(path, []byte(file), 0o600))
		_, err := runSegue(t.Context(), role, "-c", path)
		for _, want := range []string{"is already running", "needs another node.instance"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("segue %s: error %v, want %q", role, err, want)
			}
		}
	}
}

// TestLogFormats checks that both formats show the same text for a value.
func TestLogFormats(t *testing.T) {
	for format, want := range map[string]string{
		"text": `level=WARN msg="load source is stale" after=10s mode=native error="no such file" vip=2001:db8::1 count=3`,
		"json": `"level":"WARN","msg":"load source is stale","after":"10s","mode":"native","error":"no such file",` +
			`"vip":"2001:db8::1","count":3}`,
	} {
		var out bytes.Buffer
		log, err := newLog(&out, format)
		testhost.Must(t, err)
		log.Warn("load source is stale", "after", 10*time.Second, "mode", datapath.Native,
			"error", errors.New("no such file"), "vip", netip.MustParseAddr("2001:db8::1"), "count", 3)
		if !strings.HasSuffix(out.String(), want+"\n") {
			t.Errorf("%s: %swant ... %s", format, &out, want)
		}
	}
	_, err := runSegue(t.Context(), "lb", "-c", "/nonexistent", "--log-format", "xml")
	if err == nil || err.Error() != `--log-format "xml": must be text or json` {
		t.Errorf("error %v", err)
	}
}
