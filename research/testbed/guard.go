// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/segue-lb/segue/lab"
)

// guard is a process that removes a lab when the process that started the guard ends, for whatever
// reason. The guard reads from a pipe until the pipe is closed. Only that process holds the other
// end.
type guard struct {
	cmd  *exec.Cmd
	pipe io.Closer
}

// startGuard starts the guard of a lab, which need not exist yet. The guard has a session of its
// own, so that Ctrl-C does not end it.
func startGuard(name string) (*guard, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "lab", "guard", name)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the guard of the lab: %w", err)
	}
	return &guard{cmd, pipe}, nil
}

// stop ends the guard, which removes the lab if it still exists.
func (g *guard) stop() error {
	return errors.Join(g.pipe.Close(), g.cmd.Wait())
}

// Guard waits until in ends, and then removes the lab if it exists.
func Guard(name string, in io.Reader) error {
	_, _ = io.Copy(io.Discard, in)
	if err := lab.Down(name); err != nil && !errors.Is(err, lab.ErrNotUp) {
		return err
	}
	return nil
}
