// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/version"
)

const (
	// helloDeadline is the longest time until a process sends its hello. A worker sends it as soon
	// as it has started.
	helloDeadline = 30 * time.Second
	// endDeadline is how long a process may take to end after it was asked to. After that time it
	// is killed.
	endDeadline = 30 * time.Second
)

// workerClient sends requests to a worker process.
type workerClient struct {
	name    string // of the build, for messages: old or new
	build   version.Build
	command *exec.Cmd
	in      io.WriteCloser   // for requests
	out     *json.Decoder    // of answers
	stderr  bytes.Buffer     // what the process has written to standard error
	cases   map[CaseName]int // the index of each prepared case
}

// startWorker starts an executable as a worker on a CPU, and waits for its hello. The process is
// ended when the context ends.
func startWorker(ctx context.Context, name, executable string, cpu int) (*workerClient, error) {
	w := &workerClient{name: name}
	w.command = exec.CommandContext(ctx, executable, workerArguments...)
	w.command.Stderr = &w.stderr
	w.command.Cancel = func() error { return w.command.Process.Signal(syscall.SIGTERM) }
	w.command.WaitDelay = endDeadline
	var err error
	if w.in, err = w.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.out = json.NewDecoder(out)
	if err := startOnCPU(w.command, cpu); err != nil {
		return nil, fmt.Errorf("start the %s build: %w", name, err)
	}
	if err := w.greet(executable); err != nil {
		_ = w.command.Process.Kill()
		_ = w.in.Close() // otherwise Wait could wait for child processes that hold the pipe
		_ = w.command.Wait()
		return nil, w.withOutput(errors.Join(err, ctx.Err()))
	}
	return w, nil
}

// startOnCPU starts a process whose threads all run on one CPU. So two workers that run in turn use
// the same caches, and share the CPU with the same processes.
func startOnCPU(command *exec.Cmd, cpu int) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends here, with its affinity
		var set unix.CPUSet
		set.Set(cpu)
		err := unix.SchedSetaffinity(0, &set)
		if err != nil {
			err = fmt.Errorf("move to CPU %d: %w", cpu, err)
		} else {
			err = command.Start()
		}
		started <- err
	}()
	return <-started
}

// greet reads the hello. It returns an error if the process is not a worker of this protocol: such
// a process ends, writes something else, or is silent.
func (w *workerClient) greet(executable string) error {
	timer := time.AfterFunc(helloDeadline, func() { _ = w.command.Process.Kill() })
	var first hello
	err := w.out.Decode(&first)
	if !timer.Stop() { // the deadline has passed, and the process was killed
		return fmt.Errorf("%s said nothing for %v: it is not a segue with `bench worker`",
			executable, helloDeadline)
	}
	if err != nil || first.Protocol == 0 {
		return fmt.Errorf("%s has no `bench worker`: it is not segue-lab, or a build from before "+
			"--against", executable)
	}
	if first.Protocol != workerProtocol {
		return fmt.Errorf("%s speaks version %d of the worker protocol, this build version %d: "+
			"builds can be compared only if their versions are equal",
			executable, first.Protocol, workerProtocol)
	}
	w.build = first.Build
	return nil
}

// withOutput returns an error with the text that the process has written to standard error. The
// process must have ended.
func (w *workerClient) withOutput(err error) error {
	if said := strings.TrimSpace(w.stderr.String()); said != "" {
		return fmt.Errorf("%w (it wrote: %s)", err, said)
	}
	return err
}

// call sends a request and waits for the answer. Until the answer comes, it calls progress with the
// worker's progress. It returns an error if the answer has one, or if the worker ends.
func (w *workerClient) call(r request, progress Progress) (answer, error) {
	ended := func(err error) (answer, error) {
		return answer{}, fmt.Errorf("%s build: the worker ended: %w", w.name, err)
	}
	if err := json.NewEncoder(w.in).Encode(r); err != nil {
		return ended(err)
	}
	for {
		var a answer
		if err := w.out.Decode(&a); err != nil {
			return ended(err)
		}
		switch {
		case a.Progress != "":
			progress.say("%s: %s", w.name, a.Progress)
		case a.Error != "":
			return a, fmt.Errorf("%s build: %s", w.name, a.Error)
		default:
			return a, nil
		}
	}
}

// prepare makes the worker build the tables and programs of its cases.
func (w *workerClient) prepare(r prepareRequest, progress Progress) ([]workerCase, error) {
	a, err := w.call(request{Prepare: &r}, progress)
	if err != nil {
		return nil, err
	}
	w.cases = map[CaseName]int{}
	for i, c := range a.Cases {
		if _, twice := w.cases[c.CaseName]; twice {
			return nil, fmt.Errorf("%s build: two cases are %s", w.name, c.CaseName)
		}
		w.cases[c.CaseName] = i
	}
	return a.Cases, nil
}

func (w *workerClient) run(name CaseName, packets uint32) (workerCost, error) {
	a, err := w.call(request{Run: &runRequest{w.cases[name], packets}}, nil)
	if err != nil {
		return workerCost{}, err
	}
	if a.Cost == nil || a.Cost.Nanoseconds <= 0 {
		return workerCost{}, fmt.Errorf("%s build: %s: answered without a cost", w.name, name)
	}
	return *a.Cost, nil
}

// close ends the worker, and waits until it has removed its programs and tables. It returns an
// error if ServeWorker fails in the worker, for example because measurements had packets of a wrong
// kind.
func (w *workerClient) close() error {
	_ = w.in.Close() // it may have ended already
	timer := time.AfterFunc(endDeadline, func() { _ = w.command.Process.Kill() })
	defer timer.Stop()
	if err := w.command.Wait(); err != nil {
		return w.withOutput(fmt.Errorf("%s build: the worker failed: %w", w.name, err))
	}
	return nil
}
