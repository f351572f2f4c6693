// SPDX-License-Identifier: Apache-2.0

package datapathtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// failingCall is the environment variable with the number of the system call that fails.
const failingCall = "SEGUE_TEST_FAILING_CALL"

// failed is the output of a process in which the call has failed.
const failed = "failed"

// StartFailing is called in a process that RunFailing has started. It starts a data path by the
// function start, and makes a system call of start fail. If start succeeds nevertheless,
// StartFailing ends the data path by the function that start has returned.
func StartFailing(start func() (end func() error, err error), others ...uint32) error {
	call, err := strconv.Atoi(os.Getenv(failingCall))
	if err != nil {
		return err
	}
	hasFailed, err := FailAt(call, others...)
	if err != nil {
		return err
	}
	end, err := start()
	if hasFailed() {
		fmt.Println(failed)
	}
	if err != nil {
		return err
	}
	return end()
}

// RunFailing runs this program again, in a network namespace, with further variables of the
// environment. A system call of the process fails: see FailAt. The result refusal is the error of
// the start; it is empty if the start succeeded nevertheless. The result reached tells whether the
// process made so many calls that one of them failed.
func RunFailing(
	t testing.TB, in func(func() error) error, call int, environment ...string,
) (refusal string, reached bool) {
	t.Helper()
	var output, problem bytes.Buffer
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), environment...), failingCall+"="+strconv.Itoa(call))
	cmd.Stdout, cmd.Stderr = &output, &problem
	if err := in(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); (err != nil) != (problem.Len() > 0) { // a process that fails says why
		t.Fatalf("call %d fails: %v, %q", call, err, &problem)
	}
	return problem.String(), strings.TrimSpace(output.String()) == failed
}

// Starts are starts of an instance that has two configurations, 0 and 1.
type Starts struct {
	// Start starts a process with a configuration, as RunFailing does.
	Start func(number, call int) (refusal string, reached bool)
	// State reads the state that a failed start must not change.
	State func() State
	// Check checks the data path after a start. It gets the configuration of the next process.
	Check func(when string, next int, tookOver bool)
	// Detach removes the instance.
	Detach func()
}

// leastCalls is the least number of system calls of a start that are made to fail, if step is 1.
const leastCalls = 20

// FailAtSteps starts processes over a data path that is in use. In each process another system call
// fails; the calls are step apart. The first process has the configuration with this number. A
// start that succeeds nevertheless takes over, and the next process then has the other
// configuration.
func (s Starts) FailAtSteps(t testing.TB, step, number int) {
	t.Helper()
	before, refusals := s.State(), 0
	for call := 1 + rand.IntN(step); ; call += step {
		refusal, reached := s.Start(number, call)
		if !reached {
			break
		}
		when := fmt.Sprintf("call %d failed: %s", call, refusal)
		if refusal == "" {
			s.Check(when, 1-number, true)
			// The call may have kept the start from removing a pin. Any later start removes it, even
			// one that fails. So another start precedes the next reading of the state.
			s.Start(number, 0) // 0: no call fails
			number = 1 - number
			before = s.State()
		} else {
			after := s.State()
			before.RequireSame(t, when, after)
			s.Check(when, number, false)
			before = after
			refusals++
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	// The first interrupted call is a random one of the first step, so there can be one refusal
	// less.
	if (refusals+1)*step < leastCalls {
		t.Errorf("%d starts were refused; there must be more", refusals)
	}
}

// FailFirst makes first starts of an instance fail, at calls that are step apart. None may leave
// something behind.
func (s Starts) FailFirst(t testing.TB, step int) {
	t.Helper()
	before := s.State()
	for call := 1 + rand.IntN(step); ; call += step {
		refusal, reached := s.Start(0, call)
		if !reached {
			break
		}
		if refusal == "" {
			s.Detach()
		}
		before.RequireSame(t, fmt.Sprintf("call %d failed: %s", call, refusal), s.State())
		if t.Failed() {
			t.FailNow()
		}
	}
}
