// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// reportVariable is an environment variable. A copy of the test program that has it only reports to
// the file that the variable names.
const reportVariable = "LOADSHM_TEST_REPORT"

func TestMain(m *testing.M) {
	testhost.EnterOverlay()
	if path := os.Getenv(reportVariable); path != "" {
		reportAndWait(path)
	}
	os.Exit(m.Run())
}

// reportAndWait is a process that is busy until its standard input ends. It has a child process,
// as testdata/reporter.c and testdata/reporter.py have.
func reportAndWait(path string) {
	fail := func(err error) {
		if err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
	}
	r, err := Open(path, 4)
	fail(err)
	r.Begin()
	child := exec.Command("cat")
	child.Stdin = os.Stdin
	fail(child.Start())
	os.Stdout.WriteString("busy\n")
	os.Stdin.Read(make([]byte, 1))
	os.Exit(0) // without Close
}

// reporters are programs that report to a file that they get. They are busy with 1 of 4 requests,
// print "busy", and end with their standard input. Each has a child process that runs another
// program. Where the language can fork, each also has a forked child that has closed its parent's
// slot.
var reporters = map[string]func(*testing.T, string) *exec.Cmd{
	"C": func(t *testing.T, path string) *exec.Cmd {
		cmd := compileC(t, "testdata/reporter.c")
		cmd.Args = append(cmd.Args, path)
		return cmd
	},
	"Go": func(t *testing.T, path string) *exec.Cmd {
		program, err := os.Executable()
		testhost.Must(t, err)
		cmd := exec.Command(program)
		cmd.Env = append(os.Environ(), reportVariable+"="+path)
		return cmd
	},
	"Python": func(t *testing.T, path string) *exec.Cmd {
		cmd := python(t, "testdata/reporter.py")
		cmd.Args = append(cmd.Args, path)
		return cmd
	},
}

// The slot of a killed process does not count and is free, although children of the process live
// on.
func TestDeadProcess(t *testing.T) {
	for name, command := range reporters {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "load")
			cmd := command(t, path)
			startReporter(t, cmd)
			expect(t, path, 1, 4)
			testhost.Must(t, cmd.Process.Kill())
			_ = cmd.Wait()
			expectNobody(t, path)
			r := open(t, path, 2)
			defer r.Close()
			expect(t, path, 0, 2)
			if r.word != word(r.page, headerSize) {
				t.Error("the slot of the dead process was not taken again")
			}
		})
	}
}

// The locks on slots work the same on overlayfs.
func TestOnOverlayfs(t *testing.T) {
	testhost.RerunOnOverlay(t, "TestReportersAreSummed", "TestForgottenReporter", "TestDeadProcess", "TestExamples")
}

// startReporter returns when the process is busy. Its children end with the test.
func startReporter(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	// The files and pipes are not those of package exec, which would end the children with the
	// process, or wait for them.
	stdin, end, err := os.Pipe()
	testhost.Must(t, err)
	defer stdin.Close()
	t.Cleanup(func() { end.Close() })
	complaints, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	testhost.Must(t, err)
	defer complaints.Close()
	cmd.Stdin, cmd.Stderr = stdin, complaints
	out, err := cmd.StdoutPipe()
	testhost.Must(t, err)
	testhost.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line := firstLine(t, cmd.Path, out); line != "busy" {
		said, _ := os.ReadFile(complaints.Name())
		t.Fatalf("%s said %q\n%s", cmd.Path, line, said)
	}
}
