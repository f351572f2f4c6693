// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/segue-lb/segue/internal/testhost"
)

// limit is the time to wait for operations that take next to no time, unless the machine stands
// still.
const limit = time.Minute

// answered begins each answer.
const answered = "server c4605e, HTTP/3.0, client "

func TestAnswers(t *testing.T) {
	for name, flags := range map[string][]string{
		"plain": nil,
		"Retry": {"-retry", "-encode-length", "-rotation", "6", "-nonce-length", "16"},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, flags...)
			transport := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
			defer transport.Close()
			client := &http.Client{Transport: transport, Timeout: limit}
			response, err := client.Get(s.url + "/?octets=40000")
			testhost.Must(t, err)
			defer response.Body.Close()
			text, err := io.ReadAll(response.Body)
			line, rest, _ := strings.Cut(string(text), "\n")
			if err != nil || !strings.HasPrefix(line, answered) || len(rest) != 40000 {
				t.Errorf("the answer is %q and %d octets, %v; want %s and 40000 octets",
					line, len(rest), err, answered)
			}
			if got := response.Header.Get("X-Segue-Server"); got != "c4605e" {
				t.Errorf("X-Segue-Server is %q", got)
			}
		})
	}
}

// TestChromium lets a browser show the page. The browser has no TCP server to fall back to.
func TestChromium(t *testing.T) {
	testhost.NeedCommand(t, "chromium", "chromium")
	s := start(t)
	// Processes of the browser may write to its folder after the first process has ended, so
	// t.TempDir could fail to remove the folder.
	profile, err := os.MkdirTemp("", "segue-chromium-")
	testhost.Must(t, err)
	defer os.RemoveAll(profile)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "chromium",
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
		"--user-data-dir="+profile,
		"--origin-to-force-quic-on="+strings.TrimPrefix(s.url, "https://"),
		"--ignore-certificate-errors-spki-list="+s.keyHash,
		"--dump-dom", s.url)
	cmd.WaitDelay = limit // other processes of the browser may keep the output open
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), answered) {
		t.Errorf("the page is %q, %v; want %s", out, err, answered)
	}
}

func TestWrongFlags(t *testing.T) {
	for _, test := range []struct {
		id       string
		rotation uint
		nonce    int
		want     string
	}{
		{"", 0, 8, `server ID "": is 0 octets, must be 1 to 15`},
		{"c4605e", 7, 8, "rotation 7: must be 0 to 6"},
		{"c4605e", 256, 8, "rotation 256: must be 0 to 6"},
		{"c4605e", 0, 3, "nonce length 3: must be 4 to 18 octets"},
	} {
		_, err := newGenerator(test.id, test.rotation, test.nonce, false)
		if err == nil || err.Error() != test.want {
			t.Errorf("error %v, want %s", err, test.want)
		}
	}
}

// server is a running example.
type server struct{ url, keyHash string }

// start builds and starts the example, and reads its address and its key hash from the line that it
// prints when it listens.
func start(t *testing.T, flags ...string) server {
	t.Helper()
	program := filepath.Join(t.TempDir(), "server")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.Command(program, append(flags, "-server-id", "c4605e")...)
	var messages strings.Builder
	cmd.Stderr = &messages
	out, err := cmd.StdoutPipe()
	testhost.Must(t, err)
	testhost.Must(t, cmd.Start())
	stop := func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("the server said: %s", messages.String())
		}
	})
	defer time.AfterFunc(limit, stop).Stop() // ends the output, and so the wait for its first line
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the server printed no line: %v", err)
	}
	var address, keyHash string
	if _, err := fmt.Sscan(line, &address, &keyHash); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	_, port, err := net.SplitHostPort(address)
	testhost.Must(t, err)
	return server{"https://localhost:" + port, keyHash}
}
