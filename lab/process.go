// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a program that runs on a node while the lab is up. It goes on when the process that
// started it ends: later processes find it by its PID file.
type Process struct {
	Name string
	node *Node
	args []string
	// daemon tells that the process supports systemd's notification protocol and reloads on SIGHUP.
	// If daemon is false, the process is ready when it accepts connections on the TCP port or the
	// Unix socket. If it has neither, it counts as ready as soon as it has started.
	daemon bool
	port   uint16
	socket string
	// limited tells that the process shares the limit of CPU time of the node's application.
	limited bool

	// exited is closed when the process has ended and has been reaped. It is nil unless this Process
	// value has started the process.
	exited chan struct{}
}

// How long a process may take to get ready, and to end. Even on a busy machine, it needs much less.
const (
	readyTimeout = 30 * time.Second
	stopTimeout  = 10 * time.Second
)

var errEnded = errors.New("the process ended")

// String returns the names of node and process, such as "s1 agent".
func (p *Process) String() string { return p.node.Name + " " + p.Name }

// file returns the path of the process's file in a directory of the lab's state.
func (p *Process) file(dir, suffix string) string {
	return p.node.lab.path(dir, p.node.Name+"-"+p.Name+suffix)
}

// LogPath returns the file with the process's standard output and standard error.
func (p *Process) LogPath() string { return p.file("log", ".log") }

// untilReady returns a context that also ends after readyTimeout.
func untilReady(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %v", readyTimeout))
}

// Start starts the process, which must not be running, and waits until it is ready.
func (p *Process) Start(ctx context.Context) error {
	ctx, cancel := untilReady(ctx)
	defer cancel()
	if err := p.start(ctx); err != nil {
		return fmt.Errorf("start %s: %w%s", p, err, p.lastWords())
	}
	return nil
}

// closeInheritedOnExec sets close-on-exec for all file descriptors that this process has inherited,
// so that the processes of the lab do not get them. The lab's processes outlive this one, and would
// keep the lock of a flock(1), or the end of a pipe, until the lab is removed. For descriptors that
// it opens, Go sets close-on-exec itself.
func closeInheritedOnExec() error {
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("keep inherited files: %w", err)
	}
	return nil
}

// start does the same as Start, without a timeout of its own.
func (p *Process) start(ctx context.Context) error {
	if pid, alive := p.pidFile().alive(); alive {
		return fmt.Errorf("already runs as process %d", pid)
	}
	if err := closeInheritedOnExec(); err != nil {
		return err
	}
	log, err := os.OpenFile(p.LogPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	command := p.args
	if p.limited {
		if command, err = p.node.limited(command); err != nil {
			return err
		}
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	// In a session of its own, the process does not get signals from the terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var notify *NotifySocket
	if p.daemon {
		if notify, err = ListenNotify(p.file("run", ".notify")); err != nil {
			return err
		}
		defer notify.Close()
		cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify.path)
	}
	if err := p.node.Start(cmd); err != nil {
		return err
	}
	p.exited = make(chan struct{})
	go func(exited chan struct{}) {
		cmd.Wait() // to reap the process; its exit status does not matter
		close(exited)
	}(p.exited)
	if err := p.pidFile().write(cmd.Process.Pid); err != nil {
		return err
	}
	if p.daemon {
		return notify.Await(ctx, p.exited, "READY=1")
	}
	switch {
	case p.port != 0:
		return p.awaitListener(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(int(p.port)))
	case p.socket != "":
		return p.awaitListener(ctx, "unix", p.socket)
	}
	return nil
}

// awaitListener returns when the process accepts connections at an address. It tries again and
// again, because the process does not notify.
func (p *Process) awaitListener(ctx context.Context, network, address string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := p.node.Dial(ctx, network, address)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.exited:
			return errEnded
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s %s: %w", network, address, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// lastWords returns the last lines of the process's log, which an error shows at its end.
func (p *Process) lastWords() string {
	const most = 5
	text, err := os.ReadFile(p.LogPath())
	if err != nil || len(text) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	lines = lines[max(0, len(lines)-most):]
	return "\n    " + strings.Join(lines, "\n    ")
}

// Stop ends the process with SIGTERM and waits until it has ended. After stopTimeout, Stop kills
// the process. Stop also kills the remaining processes of its session, such as the workers of an
// nginx that was killed. If the process does not run, Stop only kills the rest of its session.
func (p *Process) Stop() error { return p.end(unix.SIGTERM) }

// Kill does the same as Stop, but sends SIGKILL instead of SIGTERM.
func (p *Process) Kill() error { return p.end(unix.SIGKILL) }

// end sends a signal to the process, waits until it has ended, and kills the rest of its session.
// It does nothing if there is no PID file, because the process was never started or has been ended.
func (p *Process) end(signal unix.Signal) error {
	session, _, errRead := p.pidFile().read() // the PID is also the number of the session
	err := p.pidFile().end(signal)
	if err == nil && errRead == nil {
		inSession := func(pid int) bool { return sessionOf(pid) == session }
		err = killAll(p.node.namespacePath(), inSession)
	}
	if err != nil {
		return fmt.Errorf("end %s: %w", p, err)
	}
	if p.exited != nil { // this process has started it, so wait until it is reaped
		<-p.exited
	}
	return nil
}

// Reload sends SIGHUP to a daemon and waits until the daemon has reloaded its configuration.
func (p *Process) Reload(ctx context.Context) error {
	ctx, cancel := untilReady(ctx)
	defer cancel()
	notify, err := ListenNotify(p.file("run", ".notify"))
	if err != nil {
		return fmt.Errorf("reload %s: %w", p, err)
	}
	defer notify.Close()
	if err := p.Signal(unix.SIGHUP); err != nil {
		return err
	}
	if err := notify.Await(ctx, p.exited, "RELOADING=1", "READY=1"); err != nil {
		return fmt.Errorf("reload %s: %w%s", p, err, p.lastWords())
	}
	return nil
}

// Signal sends a signal to the process. It returns an error if the process does not run.
func (p *Process) Signal(signal unix.Signal) error {
	file := p.pidFile()
	pid, alive := file.alive()
	if !alive {
		return fmt.Errorf("signal %s: the process does not run", p)
	}
	send := func(fd int) error { return unix.PidfdSendSignal(fd, signal, nil, 0) }
	if err := withPidfd(pid, file.holds, send); err != nil {
		return fmt.Errorf("signal %s: %w", p, err)
	}
	return nil
}

// PID returns the PID of the process, and whether it runs.
func (p *Process) PID() (pid int, alive bool) { return p.pidFile().alive() }

// pidFile returns the path of the process's PID file.
func (p *Process) pidFile() pidFile { return pidFile(p.file("run", ".pid")) }
