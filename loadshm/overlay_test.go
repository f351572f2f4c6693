package loadshm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// exitNoOverlay is how a copy of the test program ends that may not mount an overlay.
const exitNoOverlay = 77

// Containers have their files on overlayfs, where a mapping does not keep the mapped file open. So the
// tests of who holds a slot run there once more, in a process with a mount namespace of its own.
func TestOnOverlayfs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount an overlay")
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-test.v", "-test.timeout=5m",
		"-test.run=^(TestReportersAreSummed|TestForgottenReporter|TestDeadProcess|TestExamples)$")
	cmd.Env = append(os.Environ(), overlayVariable+"="+t.TempDir())
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

// useOverlay mounts an overlay below the folder, and makes it the place of the tests' temporary files.
func useOverlay(dir string) {
	if err := mountOverlay(dir); err != nil {
		fmt.Println(err)
		os.Exit(exitNoOverlay)
	}
	os.Unsetenv(overlayVariable)
	os.Setenv("TMPDIR", filepath.Join(dir, "merged"))
}

// mountOverlay makes a tmpfs of the folder first, since no overlay's upper layer can be on another one.
func mountOverlay(dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
	}
	options := ""
	for name, option := range map[string]string{"lower": "lowerdir", "upper": "upperdir", "work": "workdir"} {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
		options += "," + option + "=" + path
	}
	merged := filepath.Join(dir, "merged")
	if err := os.Mkdir(merged, 0o777); err != nil {
		return err
	}
	if err := unix.Mount("overlay", merged, "overlay", 0, options[1:]); err != nil {
		return fmt.Errorf("mount overlay on %s: %w", merged, err)
	}
	return nil
}
