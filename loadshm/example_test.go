// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// limit is the time to wait for operations that take next to no time, unless the machine stands
// still.
const limit = time.Minute

// The example programs, one in each language, report the number of their busy workers.
func TestExamples(t *testing.T) {
	for name, command := range map[string]func(*testing.T) *exec.Cmd{
		"C":      func(t *testing.T) *exec.Cmd { return compileC(t, "example/c/server.c") },
		"Go":     compileGo,
		"Python": func(t *testing.T) *exec.Cmd { return python(t, "example/python/server.py") },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "load")
			cmd := command(t)
			cmd.Args = append(cmd.Args, path, "4")
			url := start(t, cmd)
			expect(t, path, 0, 4)
			uploads := []*upload{newUpload(url), newUpload(url), newUpload(url)}
			await(t, path, 3, 4)
			uploads[0].finish(t)
			await(t, path, 2, 4)

			same := command(t) // a second process with the same file
			same.Args = append(same.Args, path, "6")
			start(t, same)
			expect(t, path, 2, 10)
			testhost.Must(t, same.Process.Kill())
			await(t, path, 2, 4)

			uploads[1].finish(t)
			uploads[2].finish(t)
			await(t, path, 0, 4)
		})
	}
}

// compileC compiles a C program, and returns the command that runs it. Without a compiler, it skips
// the test.
func compileC(t *testing.T, source string) *exec.Cmd {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		if compiler, err = exec.LookPath("clang"); err != nil {
			t.Skip("needs a C compiler, cc or clang")
		}
	}
	program := filepath.Join(t.TempDir(), "program")
	build(t, compiler, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", "-I.",
		"-o", program, source)
	return exec.Command(program)
}

func compileGo(t *testing.T) *exec.Cmd {
	program := filepath.Join(t.TempDir(), "server")
	build(t, "go", "build", "-o", program, "./example/go")
	return exec.Command(program)
}

func build(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// python returns the command that runs a script. Without an interpreter, it skips the test.
func python(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	interpreter, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	cmd := exec.Command(interpreter, script)
	cmd.Env = append(os.Environ(), "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

// start starts a server and returns its URL, which the server prints when it listens.
func start(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	testhost.Must(t, err)
	testhost.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s said: %s", cmd.Path, complaints.String())
		}
	})
	return "http://" + firstLine(t, cmd.Path, out)
}

// firstLine waits for the first line that a program writes.
func firstLine(t *testing.T, program string, out io.Reader) string {
	t.Helper()
	result := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		result <- line
	}()
	select {
	case line := <-result:
		if !strings.HasSuffix(line, "\n") {
			t.Fatalf("%s: the output ended in its first line, after %q", program, line)
		}
		return strings.TrimSpace(line)
	case <-time.After(limit):
		t.Fatalf("%s wrote no line within %v", program, limit)
		return ""
	}
}

// upload is a request that lasts until the test finishes it.
type upload struct {
	body  *io.PipeWriter
	reply chan string
}

const uploadSize = 1000

// newUpload begins an upload: it sends the header of a request, and no body yet.
func newUpload(url string) *upload {
	body, writer := io.Pipe()
	u := &upload{writer, make(chan string, 1)}
	go func() {
		request, err := http.NewRequest("POST", url, body)
		if err != nil {
			u.reply <- err.Error()
			return
		}
		request.ContentLength = uploadSize
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			u.reply <- err.Error()
			return
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		u.reply <- string(text)
	}()
	return u
}

// finish sends the body, and checks the reply.
func (u *upload) finish(t *testing.T) {
	t.Helper()
	if _, err := u.body.Write(make([]byte, uploadSize)); err != nil {
		t.Error(err)
	}
	u.body.Close()
	want := fmt.Sprintf("%d bytes\n", uploadSize)
	select {
	case reply := <-u.reply:
		if reply != want {
			t.Errorf("the server replied %q, want %q", reply, want)
		}
	case <-time.After(limit):
		t.Fatalf("the server did not reply within %v", limit)
	}
}

// await returns when the file contains the expected load. There is no notification for that.
func await(t *testing.T, path string, busy, capacity uint32) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		gotBusy, gotCapacity, err := Read(path)
		if err == nil && gotBusy == busy && gotCapacity == capacity {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still reads %d of %d, error %v; want %d of %d", gotBusy, gotCapacity, err, busy, capacity)
		}
	}
}
