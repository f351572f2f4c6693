// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

var buildImage = flag.Bool("image", false, "build the container image in TestImage, which takes minutes")

// TestImage builds the image of packaging/Containerfile by buildah, on a Debian root of these tests,
// and runs its program. The build has the Go and the modules of this machine.
func TestImage(t *testing.T) {
	if !*buildImage {
		t.Skip("installs a compiler and compiles everything once more, which takes minutes: -image")
	}
	testhost.NeedCommand(t, "buildah", "buildah")
	source, storage := t.TempDir(), t.TempDir()
	t.Setenv("BUILDAH_ISOLATION", "chroot") // needs no container runtime
	buildah := func(args ...string) string {
		t.Helper()
		all := append([]string{"--storage-driver", "vfs", "--root", storage + "/root", "--runroot", storage + "/run"}, args...)
		cmd := exec.CommandContext(t.Context(), "buildah", all...)
		cmd.Dir = source
		var log strings.Builder
		cmd.Stderr = &log
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("buildah %s: %v\n%s", strings.Join(args, " "), err, lastLines([]byte(string(out)+log.String()), 20))
		}
		return strings.TrimSpace(string(out))
	}
	base := buildah("from", "scratch")
	buildah("add", "--quiet", base, debianRoot(t, "trixie"), "/")
	buildah("commit", "--quiet", base, "localhost/base")
	for _, part := range []string{"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "bpf", "cmd", "docs", "experiments",
		"go.mod", "go.sum", "internal", "loadshm", "p4", "packaging", "quiclb", "scripts"} {
		run(t, "cp", "-r", filepath.Join(project, part), source)
	}
	args := []string{"build", "--quiet", "--network=host", "--build-arg=BASE=localhost/base", "--build-arg=VERSION=1.2.3",
		"--ignorefile=packaging/Containerfile.dockerignore", "--file=packaging/Containerfile", "--tag=segue"}
	for name, to := range map[string]string{"GOROOT": "/usr/local/go", "GOMODCACHE": "/root/go/pkg/mod",
		"GOCACHE": "/root/.cache/go-build"} {
		args = append(args, "--volume="+strings.TrimSpace(run(t, "go", "env", name))+":"+to)
	}
	buildah(append(args, ".")...)

	container := buildah("from", "localhost/segue")
	if out := buildah("run", container, "/usr/bin/segue", "version"); !strings.HasPrefix(out, "segue 1.2.3\n") {
		t.Errorf("segue version: %s", out)
	}
	root := buildah("mount", container)
	for _, path := range readImage(t).files {
		if info, err := os.Stat(filepath.Join(root, path)); err != nil || info.Size() == 0 {
			t.Errorf("%s of the image: %v", path, err)
		}
	}
}
