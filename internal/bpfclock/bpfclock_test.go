// SPDX-License-Identifier: Apache-2.0

package bpfclock

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

// inNamespace is the environment variable of a process that prints the clocks.
const inNamespace = "SEGUE_TEST_CLOCKS"

func TestMain(m *testing.M) {
	if os.Getenv(inNamespace) == "" {
		os.Exit(m.Run())
	}
	seen, err1 := seen(unix.CLOCK_MONOTONIC)
	monotonic, err2 := Monotonic()
	boot, err3 := Boot()
	if err := errors.Join(err1, err2, err3); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(int64(seen), int64(monotonic), int64(boot))
}

// TestTimeNamespace reads the clocks in a time namespace with offsets, in which the clocks of the
// process have jumped by days.
func TestTimeNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a time namespace")
	}
	for _, offset := range []string{"1000000", "-3"} {
		before := clocks(t)
		cmd := exec.Command("unshare", "--time", "--fork", "--monotonic="+offset, "--boottime="+offset, os.Args[0])
		cmd.Env = append(os.Environ(), inNamespace+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			if probe := exec.Command("unshare", "--time", "true").Run(); probe != nil {
				t.Skipf("there are no time namespaces here: %v", probe)
			}
			t.Fatalf("%v: %s", err, out)
		}
		after := clocks(t)
		var seen, monotonic, boot time.Duration
		if _, err := fmt.Sscan(string(out), &seen, &monotonic, &boot); err != nil {
			t.Fatalf("%q: %v", out, err)
		}
		if seen == monotonic {
			t.Fatalf("offset %s: the process is not in a time namespace", offset)
		}
		for i, now := range []time.Duration{monotonic, boot} {
			if now < before[i] || now > after[i] {
				t.Errorf("offset %s: clock %d is %v, and was %v before and %v after", offset, i, now, before[i], after[i])
			}
		}
	}
}

func clocks(t *testing.T) [2]time.Duration {
	t.Helper()
	monotonic, err1 := Monotonic()
	boot, err2 := Boot()
	testhost.Must(t, errors.Join(err1, err2))
	return [2]time.Duration{monotonic, boot}
}

func TestParse(t *testing.T) {
	got, err := parse("monotonic     1000000         5\nboottime           -3         0\n")
	want := map[string]time.Duration{"monotonic": 1000000*time.Second + 5, "boottime": -3 * time.Second}
	if err != nil || !cmp.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"monotonic 1\n", "monotonic x 0\n", "\n"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}
