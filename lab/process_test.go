// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/testhost"
)

// sleeper starts a process that does nothing. The channel is closed when the process has ended.
func sleeper(t *testing.T) (pid int, ended <-chan struct{}) {
	cmd := exec.Command("sleep", "1000")
	testhost.Must(t, cmd.Start())
	done := make(chan struct{})
	go func() {
		cmd.Wait()
		close(done)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-done
	})
	return cmd.Process.Pid, done
}

func TestPidFileEndsItsProcess(t *testing.T) {
	file := pidFile(filepath.Join(t.TempDir(), "pid"))
	pid, ended := sleeper(t)
	testhost.Must(t, file.write(pid))
	if got, alive := file.alive(); got != pid || !alive {
		t.Errorf("alive() = %d, %t; want %d, true", got, alive, pid)
	}
	testhost.Must(t, file.end(unix.SIGTERM))
	await(t, "the end of the process", ended)
	if _, err := os.Stat(string(file)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the PID file is still there: %v", err)
	}
}

func TestPidFileSparesAnotherProcessWithTheSameNumber(t *testing.T) {
	file := pidFile(filepath.Join(t.TempDir(), "pid"))
	pid, ended := sleeper(t)
	testhost.Must(t, os.WriteFile(string(file), fmt.Appendf(nil, "%d 12345\n", pid), 0o644))
	if _, alive := file.alive(); alive {
		t.Error("a process with another start time counts as the recorded one")
	}
	testhost.Must(t, file.end(unix.SIGKILL))
	select {
	case <-ended:
		t.Error("it was killed")
	default:
		if err := unix.Kill(pid, 0); err != nil {
			t.Error(err)
		}
	}
}

func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := ListenNotify(path)
	testhost.Must(t, err)
	defer socket.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	testhost.Must(t, daemon.Notify("READY=1"))
	never := make(chan struct{})
	if err := socket.Await(t.Context(), never, "READY=1"); err != nil {
		t.Error(err)
	}
	// A reload ends with the READY=1 after RELOADING=1, and not with one before.
	testhost.Must(t, daemon.Notify("READY=1"))
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errors.New("too late"))
	defer cancel()
	err = socket.Await(ctx, never, "RELOADING=1", "READY=1")
	if err == nil || !strings.Contains(err.Error(), "waiting for RELOADING=1, READY=1: too late") {
		t.Errorf("await without RELOADING=1: %v", err)
	}
}

func TestNotifyReportsTheEndOfTheProcess(t *testing.T) {
	socket, err := ListenNotify(filepath.Join(t.TempDir(), "notify"))
	testhost.Must(t, err)
	defer socket.Close()
	exited := make(chan struct{})
	close(exited)
	if err := socket.Await(t.Context(), exited, "READY=1"); !errors.Is(err, errEnded) {
		t.Errorf("await: %v", err)
	}
}

// A lock that the lab's builder inherited is free when the builder has ended, and not only when the
// lab is removed.
func TestInheritedStaysHere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	inherited, err := unix.Open(path, unix.O_CREAT|unix.O_RDWR, 0o600) // not close-on-exec, as flock(1) has it
	testhost.Must(t, err)
	defer unix.Close(inherited)
	testhost.Must(t, closeInheritedOnExec())
	flags, err := unix.FcntlInt(uintptr(inherited), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the flags are %#x, error %v", flags, err)
	}
}
