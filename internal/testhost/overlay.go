// SPDX-License-Identifier: Apache-2.0

package testhost

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// folderVariable is the name of the environment variable that tells a copy of the test program
// where to mount the overlay.
const folderVariable = "SEGUE_TEST_OVERLAY"

// exitNoOverlay is the exit code of a copy of the test program that may not mount an overlay.
const exitNoOverlay = 77

// RerunOnOverlay runs the named tests of the package in a copy of the test program. The copy has
// its own mount namespace, and its temporary files are on overlayfs, as the files of containers
// are. There, a mapping does not keep the mapped file open, and stat(2) and /proc/locks may show
// different numbers for one file. TestMain must begin with EnterOverlay. RerunOnOverlay skips the
// test if an overlay cannot be mounted.
func RerunOnOverlay(t *testing.T, tests ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount an overlay")
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-test.v", "-test.timeout=5m",
		"-test.run=^("+strings.Join(tests, "|")+")$")
	cmd.Env = append(os.Environ(), folderVariable+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == exitNoOverlay, errors.Is(err, unix.EPERM):
		t.Skipf("may not mount an overlay here: %v\n%s", err, out)
	case err != nil:
		t.Errorf("%v\n%s", err, out)
	}
}

// EnterOverlay mounts the overlay, if RerunOnOverlay has started this process. Otherwise it does
// nothing. If the process may not mount an overlay, EnterOverlay ends it with exitNoOverlay.
func EnterOverlay() {
	dir := os.Getenv(folderVariable)
	if dir == "" {
		return
	}
	if err := mount(dir); err != nil {
		fmt.Println(err)
		os.Exit(exitNoOverlay)
	}
	os.Unsetenv(folderVariable)
	os.Setenv("TMPDIR", filepath.Join(dir, "merged"))
}

// mount mounts an overlay at dir/merged. Its upper layer is on a tmpfs: dir may be on another
// overlay, and an upper layer cannot be there. The lower layer is in dir, so the two layers are on
// different file systems.
func mount(dir string) error {
	lower, memory, merged := filepath.Join(dir, "lower"), filepath.Join(dir, "memory"), filepath.Join(dir, "merged")
	upper, work := filepath.Join(memory, "upper"), filepath.Join(memory, "work")
	if err := errors.Join(os.Mkdir(lower, 0o755), os.Mkdir(memory, 0o755), os.Mkdir(merged, 0o755)); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", memory, "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", memory, err)
	}
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755)); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work)
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount overlay on %s: %w", merged, err)
	}
	return nil
}
