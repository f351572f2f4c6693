// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// stuck is a script that never ends.
const stuck = "exec sleep infinity"

// runScript runs a script of the package, with other programs by the names that the map has. It
// returns the calls of these programs that the script has made, and what the script prints. The
// script runs where systemd seems to run, with an instance "lb" in the BPF file system.
func runScript(t *testing.T, script string, programs map[string]string, args ...string) (calls, output string) {
	t.Helper()
	testhost.NeedNamespaces(t)
	dir := t.TempDir()
	pins, tools, log := filepath.Join(dir, "pins"), filepath.Join(dir, "tools"), filepath.Join(dir, "calls")
	must(t, os.MkdirAll(filepath.Join(pins, "segue/lb"), 0o755))
	must(t, os.Mkdir(tools, 0o755))
	for name, text := range programs {
		text = "#!/bin/sh\necho \"" + name + " $*\" >>" + log + "\n" + text + "\n"
		must(t, os.WriteFile(filepath.Join(tools, name), []byte(text), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	file, err := filepath.Abs(filepath.Join(project, "packaging/scripts", script))
	must(t, err)
	const prepare = `mount --bind "$0" /sys/fs/bpf && mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec sh "$@"`
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child",
		"sh", "-c", prepare, pins, file}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+tools+":/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v\n%s", script, strings.Join(args, " "), err, out)
	}
	text, _ := os.ReadFile(log)
	return string(text), string(out)
}

// callsOf returns the calls of one program.
func callsOf(program, calls string) string {
	var own strings.Builder
	for line := range strings.Lines(calls) {
		if rest, ok := strings.CutPrefix(line, program+" "); ok {
			own.WriteString(rest)
		}
	}
	return own.String()
}

// TestRemoveDrains: a balancer that can be drained is drained before its data path goes.
func TestRemoveDrains(t *testing.T) {
	calls, _ := runScript(t, "prerm", map[string]string{
		"stat":               "echo segue", // the owner of the directory
		"deb-systemd-invoke": "",
		"segue":              "",
	}, "remove")
	const want = "drain --self --dry-run --instance lb\n" +
		"drain --self --until-restart --timeout 1m --instance lb\nlb detach lb\n"
	if got := callsOf("segue", calls); got != want {
		t.Errorf("prerm has called segue with %q, want %q", got, want)
	}
}

// TestRemoveWithStuckProcess: a process that does not answer does not keep the package from being
// removed. Its data path is detached.
func TestRemoveWithStuckProcess(t *testing.T) {
	calls, _ := runScript(t, "prerm", map[string]string{
		"stat":               "echo segue", // the owner of the directory
		"deb-systemd-invoke": "",
		"segue":              "case $* in *--self*) " + stuck + " ;; esac",
	}, "remove")
	const want = "drain --self --dry-run --instance lb\nlb detach lb\n"
	if got := callsOf("segue", calls); got != want {
		t.Errorf("prerm has called segue with %q, want %q", got, want)
	}
}

// TestInstallWithStuckStart: an installation ends although the processes are not ready, because
// their store does not answer. An upgrade also restarts processes that are still starting.
func TestInstallWithStuckStart(t *testing.T) {
	programs := map[string]string{
		"timeout":            "shift\nexec /usr/bin/timeout 0.1 \"$@\"", // instead of a minute
		"deb-systemd-invoke": stuck,
		"deb-systemd-helper": "",
		"systemctl":          "case $* in *ActiveState*) echo activating ;; *is-enabled*) echo enabled ;; esac",
		"segue":              "", // the files are valid
		"systemd-sysusers":   "",
		"chown":              "",
	}
	for _, test := range []struct {
		args []string
		verb string
	}{
		{[]string{"configure", ""}, "start"},
		{[]string{"configure", "0.1"}, "restart"},
	} {
		calls, out := runScript(t, "postinst", programs, test.args...)
		want := strings.ReplaceAll("VERB segue-lb.service\nVERB segue-agent.service\n", "VERB", test.verb)
		if got := callsOf("deb-systemd-invoke", calls); got != want {
			t.Errorf("postinst %q has called deb-systemd-invoke with %q, want %q", test.args, got, want)
		}
		for _, unit := range []string{"segue-lb.service", "segue-agent.service"} {
			if want := "segue: " + unit + " is still starting"; !strings.Contains(out, want) {
				t.Errorf("postinst %q does not say %q:\n%s", test.args, want, out)
			}
		}
	}
}

// TestScriptsOfRPM runs the scripts as rpm does, which passes numbers of installed versions. There is
// no deb-systemd-invoke and no deb-systemd-helper then.
func TestScriptsOfRPM(t *testing.T) {
	const absent = "exit 127"
	programs := map[string]string{
		"deb-systemd-invoke": absent,
		"deb-systemd-helper": absent,
		"systemctl":          "case $* in *ActiveState*) echo active ;; *is-enabled*agent*) exit 1 ;; esac",
		"segue":              "",
		"stat":               "echo segue", // the owner of the directory
		"systemd-sysusers":   "",
		"chown":              "",
	}
	const state = "show --property=ActiveState --value "
	for _, test := range []struct{ name, script, argument, want string }{
		{
			"first installation", "postinst", "1",
			"preset segue-lb.service segue-agent.service segue-drain.service\n--system daemon-reload\n" +
				"--quiet is-enabled segue-lb.service\nstart segue-lb.service\n--quiet is-enabled segue-agent.service\n",
		},
		{
			"upgrade", "postinst", "2",
			"--system daemon-reload\n" + state + "segue-lb.service\nrestart segue-lb.service\n" +
				state + "segue-agent.service\nrestart segue-agent.service\n",
		},
		{"upgrade, the earlier version", "prerm", "1", ""},
		{"upgrade, at its end", "postrm", "1", "--system daemon-reload\n"},
		{
			"removal", "prerm", "0",
			"stop segue-drain.service segue-lb.service segue-agent.service\n" +
				"--no-reload disable segue-drain.service segue-lb.service segue-agent.service\n",
		},
		{"removal, at its end", "postrm", "0", "--system daemon-reload\n"},
	} {
		calls, out := runScript(t, test.script, programs, test.argument)
		if got := callsOf("systemctl", calls); got != test.want {
			t.Errorf("%s: %s has called systemctl with %q, want %q", test.name, test.script, got, test.want)
		}
		if strings.Contains(calls, "deb-systemd") || out != "" {
			t.Errorf("%s: %s has made the calls %q, and says %q", test.name, test.script, calls, out)
		}
		detached := strings.Contains(callsOf("segue", calls), "lb detach lb\n")
		if wanted := test.name == "removal"; detached != wanted {
			t.Errorf("%s: the data path is detached: %v", test.name, detached)
		}
	}
}

// TestPurgeWithRunningProcess: the user stays while a process of it runs, and the purge succeeds. If
// the user can be removed, its group goes, too, also if it has other members.
func TestPurgeWithRunningProcess(t *testing.T) {
	for _, test := range []struct{ userdel, removed, says string }{
		{"exit 8", "", "the user segue stays"},
		{"exit 0", "segue\n", ""},
	} {
		calls, out := runScript(t, "postrm", map[string]string{
			"userdel":            test.userdel,
			"groupdel":           "",
			"getent":             "", // the user exists, and so does the group
			"deb-systemd-helper": "",
			"systemctl":          "",
			"rm":                 "",
		}, "purge")
		if got := callsOf("groupdel", calls); got != test.removed {
			t.Errorf("with userdel %q, postrm removes the groups %q, want %q", test.userdel, got, test.removed)
		}
		if !strings.Contains(out, test.says) {
			t.Errorf("with userdel %q, postrm says %q", test.userdel, out)
		}
		if got := callsOf("rm", calls); got != "-rf /etc/segue /var/lib/segue /run/segue\n" {
			t.Errorf("postrm removes %q", got)
		}
	}
}
