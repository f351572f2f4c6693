// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/needs"
)

// TestRemoveWithStuckProcess: a process that does not answer does not keep the package from being
// removed. Its data path is detached.
func TestRemoveWithStuckProcess(t *testing.T) {
	needs.Namespaces(t)
	dir := t.TempDir()
	pins, tools := filepath.Join(dir, "pins"), filepath.Join(dir, "tools")
	calls := filepath.Join(dir, "calls")
	must(t, os.MkdirAll(filepath.Join(pins, "segue/lb"), 0o755))
	must(t, os.Mkdir(tools, 0o755))
	for name, script := range map[string]string{
		"stat":               "echo segue", // the owner of the directory
		"deb-systemd-invoke": "exit 0",
		"segue": `echo "$*" >>"` + calls + `"
case $* in *--self*) exec sleep infinity ;; esac`,
	} {
		must(t, os.WriteFile(filepath.Join(tools, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--fork", "--kill-child",
		"sh", "-c", `mount --bind "$0" /sys/fs/bpf && exec sh "$1" remove`,
		pins, filepath.Join(project, "packaging/scripts/prerm"))
	cmd.Env = append(os.Environ(), "PATH="+tools+":/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("prerm: %v\n%s", err, out)
	}
	got, _ := os.ReadFile(calls)
	const want = "drain --self --dry-run --instance lb\nlb detach lb\n"
	if string(got) != want {
		t.Errorf("prerm has called segue with %q, want %q", got, want)
	}
}
