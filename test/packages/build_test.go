// SPDX-License-Identifier: Apache-2.0

// Package packages tests the Debian packages: how they are built, and what they do on bare Debian
// hosts on which systemd runs.
package packages

import (
	"debug/buildinfo"
	"debug/elf"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

const (
	project = "../.."
	// Versions of the packages that the tests install. The earlier one is a build of the same tree,
	// because there is no release yet: it tests the maintainer scripts and the restart, and not
	// tables of another layout. -previous names a commit to build instead.
	earlier = "0.8.0"
	later   = "0.9.0~rc.1+2.gabcdef0"
	// commit is the commit that all packages are said to be of, and its time.
	commit = "c0ffee1234567890c0ffee1234567890c0ffee12,2026-01-02T03:04:05Z"
)

var previous = flag.String("previous", "", "`commit` from whose package TestPackage upgrades; empty: this one")

// buildEarlier builds the package from which the tests upgrade, and returns its path.
func buildEarlier(t *testing.T) string {
	t.Helper()
	if *previous == "" {
		return buildPackage(t, earlier)
	}
	build, _ := built.LoadOrStore("previous", sync.OnceValues(func() (string, error) {
		dir, err := os.MkdirTemp("", "segue-previous")
		if err != nil {
			return "", err
		}
		defer os.RemoveAll(dir)
		const script = `git clone --quiet --no-checkout . "$0" && git -C "$0" checkout --quiet "$1" &&
			cp -r .tools/bin "$0/.tools-bin" && mkdir "$0/.tools" && mv "$0/.tools-bin" "$0/.tools/bin" &&
			make -C "$0" package VERSION="$2" >&2 && cp "$0"/bin/*_*.deb bin/`
		cmd := exec.Command("sh", "-c", script, dir, *previous, earlier)
		cmd.Dir = project
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build commit %s: %w\n%s", *previous, err, out)
		}
		return buildName(earlier)
	}))
	path, err := build.(func() (string, error))()
	must(t, err)
	return path
}

// buildName returns the path of the package of a version.
func buildName(version string) (string, error) {
	return filepath.Abs(filepath.Join(project, "bin", fmt.Sprintf("segue_%s_%s.deb", version, runtime.GOARCH)))
}

// built has the packages that the tests have built, by version.
var built sync.Map

// laboratory returns the path of the package of the laboratory that was built with a package.
func laboratory(path string) string {
	return filepath.Join(filepath.Dir(path), strings.Replace(filepath.Base(path), "segue_", "segue-lab_", 1))
}

// buildPackage builds both packages with a version, and returns the path of the first.
func buildPackage(t *testing.T, version string) string {
	t.Helper()
	build, _ := built.LoadOrStore(version, sync.OnceValues(func() (string, error) {
		return buildIn(project, version)
	}))
	path, err := build.(func() (string, error))()
	must(t, err)
	return path
}

// buildIn builds both packages of a source folder, and returns the path of the first.
func buildIn(folder, version string, env ...string) (string, error) {
	cmd := exec.Command("packaging/build.sh")
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "VERSION="+version, "SOURCE_DATE_EPOCH=1700000000", "CGO_ENABLED=0",
		"OUT="+filepath.Join("bin", "package-"+version),
		"LDFLAGS=-s -w -X github.com/segue-lb/segue/internal/version.release="+version+
			" -X github.com/segue-lb/segue/internal/version.commit="+commit)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build version %s: %w\n%s", version, err, out)
	}
	lines := strings.Fields(string(out))
	return filepath.Abs(filepath.Join(folder, lines[len(lines)-2]))
}

// rpmOf returns the path of the rpm that was built with a deb.
func rpmOf(deb string) string {
	parts := strings.Split(strings.TrimSuffix(filepath.Base(deb), ".deb"), "_")
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[parts[2]]
	return filepath.Join(filepath.Dir(deb), fmt.Sprintf("%s-%s-1.%s.rpm", parts[0], parts[1], arch))
}

// TestRPM looks into the rpm packages. No distribution with rpm is here, so it installs none.
func TestRPM(t *testing.T) {
	testhost.NeedCommand(t, "rpm", "rpm")
	deb := buildPackage(t, later)
	query := func(deb string, args ...string) string {
		return run(t, slices.Concat([]string{"rpm", "--query", "--package"}, args, []string{rpmOf(deb)})...)
	}
	requires := query(deb, "--requires")
	for _, part := range []string{"systemd >= 252\n", "/bin/sh\n"} {
		if !strings.Contains(requires, part) {
			t.Errorf("segue requires %q, want %q", requires, part)
		}
	}
	if strings.Contains(requires, "init-system-helpers") || strings.Contains(requires, "passwd") {
		t.Errorf("segue requires packages of Debian: %q", requires)
	}
	if got, want := query(laboratory(deb), "--requires"), "segue = "+later+"\n"; !strings.Contains(got, want) {
		t.Errorf("segue-lab requires %q, want %q", got, want)
	}
	scripts := query(deb, "--scripts")
	for _, part := range []string{
		"postinstall scriptlet", "systemctl preset", "preuninstall scriptlet", "segue drain --self",
		"postuninstall scriptlet",
	} {
		if !strings.Contains(scripts, part) {
			t.Errorf("the scripts do not have %q:\n%s", part, scripts)
		}
	}
	list := query(deb, "--list")
	for _, file := range []string{
		"/etc/segue\n", "/usr/bin/segue\n", "/usr/lib/systemd/system/segue-lb.service\n",
		"/usr/share/man/man8/segue-lb.8.gz\n", "/usr/share/segue/segue_load.py\n",
		"/usr/share/zsh/site-functions/_segue\n",
	} {
		if !strings.Contains(list, file) {
			t.Errorf("segue does not have %q", file)
		}
	}
	for _, folder := range []string{"dist-packages", "vendor-completions"} { // Debian's
		if strings.Contains(list, folder) {
			t.Errorf("segue has a file in %s", folder)
		}
	}
}

// TestReproducible builds the packages of a copy of the source in another folder, at another time.
func TestReproducible(t *testing.T) {
	first := buildPackage(t, earlier)
	copied := t.TempDir()
	for _, part := range []string{"CHANGELOG.md", "README.md", "bpf", "cmd", "docs", "experiments", "go.mod", "go.sum",
		"internal", "lab", "loadshm", "p4", "packaging", "quiclb", "research", "scripts"} {
		run(t, "cp", "-r", "--no-preserve=all", filepath.Join(project, part), copied)
	}
	for _, script := range []string{"packaging/build.sh", "packaging/scripts/postinst", "packaging/scripts/prerm",
		"packaging/scripts/postrm", "scripts/version.sh", "docs/examples/fleet/hosts.sh"} {
		must(t, os.Chmod(filepath.Join(copied, script), 0o700))
	}
	second, err := buildIn(copied, earlier, "TZ=Asia/Kolkata", "LC_ALL=C")
	must(t, err)
	for _, pair := range [][]string{
		{first, second}, {laboratory(first), laboratory(second)}, {rpmOf(first), rpmOf(second)},
	} {
		if out, err := exec.CommandContext(t.Context(), "cmp", pair...).CombinedOutput(); err != nil {
			t.Errorf("the packages differ: %s", out)
		}
	}
}

var foreign = flag.Bool("foreign", false, "build the package of another architecture in TestForeign, which takes minutes")

// TestForeign builds the package of another architecture, and runs its program where qemu can.
func TestForeign(t *testing.T) {
	if !*foreign {
		t.Skip("compiles everything once more, which takes minutes: -foreign")
	}
	arch, machine, emulator := "arm64", elf.EM_AARCH64, "qemu-aarch64-static"
	if runtime.GOARCH == arch {
		arch, machine, emulator = "amd64", elf.EM_X86_64, "qemu-x86_64-static"
	}
	deb, err := buildIn(project, "0.8.1", "GOARCH="+arch)
	must(t, err)
	if got := strings.TrimSpace(run(t, "dpkg-deb", "--field", deb, "Architecture")); got != arch {
		t.Errorf("the package is of the architecture %s", got)
	}
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", deb, dir)
	program := filepath.Join(dir, "usr/bin/segue")
	file, err := elf.Open(program)
	must(t, err)
	defer file.Close()
	if file.Machine != machine {
		t.Errorf("the program is for %s", file.Machine)
	}
	if pages, err := filepath.Glob(filepath.Join(dir, "usr/share/man/man8/*.gz")); err != nil || len(pages) < 20 {
		t.Errorf("the package has %d man pages: %v", len(pages), err)
	}
	testhost.NeedCommand(t, emulator, "qemu-user-static")
	if out := run(t, emulator, program, "version"); !strings.Contains(out, "segue 0.8.1\n") || !strings.Contains(out, arch) {
		t.Errorf("segue version: %s", out)
	}
	for role, example := range map[string]string{"lb": "lb.yaml", "agent": "agent.yaml"} {
		run(t, emulator, program, "check", "--role", role, "-c", filepath.Join(project, "docs/examples", example))
	}
}

// TestNotices requires that each package has the licence of each module that is part of its program.
func TestNotices(t *testing.T) {
	deb := buildPackage(t, earlier)
	t.Run("segue", func(t *testing.T) { testNotices(t, "segue", deb) })
	t.Run("segue-lab", func(t *testing.T) { testNotices(t, "segue-lab", laboratory(deb)) })
}

func testNotices(t *testing.T, program, deb string) {
	const script = `dpkg-deb --fsys-tarfile "$0" | tar -xO ./usr/share/doc/"$1"/copyright`
	text := run(t, "sh", "-c", script, deb, program)
	licenses := map[string]string{} // by PATH@VERSION
	for stanza := range strings.SplitSeq(text, "\n\n") {
		_, license, found := strings.Cut(stanza, "\nLicense: ")
		if files, has := strings.CutPrefix(stanza, "Files: "); has {
			files, _, _ = strings.Cut(files, "\nCopyright:")
			for _, name := range strings.Fields(files) {
				licenses[name] = license
			}
			if name, terms, _ := strings.Cut(license, "\n"); !found || name == "" || len(terms) < 50 {
				t.Errorf("%s has no licence:\n%s", files, license)
			}
		}
	}
	info, err := buildinfo.ReadFile(filepath.Join(project, "bin/package-"+earlier, program))
	must(t, err)
	if len(info.Deps) < 10 {
		t.Fatalf("the program has only %d modules", len(info.Deps))
	}
	for _, module := range info.Deps {
		if licenses[module.Path+"@"+module.Version] == "" {
			t.Errorf("no licence of %s %s", module.Path, module.Version)
		}
	}
	if !strings.Contains(licenses["github.com/cilium/ebpf@"+versionOf(info, "github.com/cilium/ebpf")],
		"Permission is hereby granted") {
		t.Error("the licence of cilium/ebpf is not its own")
	}
	if licenses["go.dev@"+strings.TrimPrefix(runtime.Version(), "go")] == "" {
		t.Errorf("no licence of %s", runtime.Version())
	}
}

func versionOf(info *buildinfo.BuildInfo, module string) string {
	for _, m := range info.Deps {
		if m.Path == module {
			return m.Version
		}
	}
	return ""
}

// TestVersion checks versions of a repository while commits and tags are added, and that they sort
// as the commits do.
func TestVersion(t *testing.T) {
	testhost.NeedCommand(t, "git", "git")
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "scripts"), 0o755))
	run(t, "cp", filepath.Join(project, "scripts/version.sh"), filepath.Join(dir, "scripts"))
	version := func() string {
		t.Helper()
		return strings.TrimSpace(run(t, filepath.Join(dir, "scripts/version.sh")))
	}
	if got := version(); got != "" {
		t.Errorf("without a repository: %q", got)
	}
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=n", "-c", "user.email=e"}, args...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_COMMITTER_DATE=2026-08-01T09:30:00+05:30")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	git("init", "-q")
	git("add", ".")
	var versions []string
	expect := func(want string) {
		t.Helper()
		short := exec.CommandContext(t.Context(), "git", "rev-parse", "--short=7", "HEAD")
		short.Dir = dir
		hash, err := short.Output()
		must(t, err)
		want = strings.ReplaceAll(want, "HASH", strings.TrimSpace(string(hash)))
		if got := version(); got != want {
			t.Errorf("version %q, want %q", got, want)
		}
		versions = append(versions, version())
	}
	git("commit", "-qm", "first")
	expect("0.0.0~git20260801040000.HASH")
	git("tag", "v1.2.0-rc.1")
	expect("1.2.0~rc.1")
	git("commit", "-qm", "second", "--allow-empty")
	expect("1.2.0~rc.1+1.gHASH")
	git("tag", "v1.2.0")
	git("tag", "other")
	expect("1.2.0")
	for range 10 {
		git("commit", "-qm", "more", "--allow-empty")
		if len(versions) == 4 {
			expect("1.2.0+1.gHASH")
		}
	}
	expect("1.2.0+10.gHASH")
	git("tag", "-am", "annotated", "v1.2.1")
	expect("1.2.1")
	for i := range versions[1:] {
		run(t, "dpkg", "--compare-versions", versions[i], "lt", versions[i+1])
	}
	file, err := os.OpenFile(filepath.Join(dir, "scripts/version.sh"), os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	_, err = file.WriteString("# changed\n")
	must(t, err)
	must(t, file.Close())
	expect("1.2.1+dirty")

	// make gives the linker the version and the commit, for the program and for the package.
	run(t, "cp", filepath.Join(project, "Makefile"), filepath.Join(project, "go.mod"), dir)
	for _, folder := range []string{"cmd", "internal", "lab", "packaging", "research"} {
		must(t, os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	head := exec.CommandContext(t.Context(), "git", "rev-parse", "HEAD")
	head.Dir = dir
	hash, err := head.Output()
	must(t, err)
	for _, target := range []string{"build", "package"} {
		dry := exec.CommandContext(t.Context(), "make", "--dry-run", target)
		dry.Dir, dry.Env = dir, append(os.Environ(), "MAKEFLAGS=")
		out, err := dry.CombinedOutput()
		stamp := "version.release=1.2.1+dirty -X github.com/segue-lb/segue/internal/version.commit=" +
			strings.TrimSpace(string(hash)) + ",2026-08-01T04:00:00Z"
		if err != nil || !strings.Contains(string(out), stamp) {
			t.Errorf("make %s: %v, want %s in\n%s", target, err, stamp, out)
		}
	}
}

// TestCommit checks that the program of the package knows its commit.
func TestCommit(t *testing.T) {
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", buildPackage(t, earlier), dir)
	out := run(t, filepath.Join(dir, "usr/bin/segue"), "version")
	want := "segue " + earlier + "\ncommit: " + strings.Replace(commit, ",", ", ", 1) + "\n"
	if !strings.HasPrefix(out, want) {
		t.Errorf("segue version prints\n%s, want\n%s", out, want)
	}
}

// TestLaboratoryPackage checks that the package of the laboratory needs the other one of its version, and
// that both have no file in common.
func TestLaboratoryPackage(t *testing.T) {
	deb := buildPackage(t, earlier)
	lab := laboratory(deb)
	if got, want := strings.TrimSpace(run(t, "dpkg-deb", "--field", lab, "Depends")), "segue (= "+earlier+")"; got != want {
		t.Errorf("it depends on %q, want %q", got, want)
	}
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", lab, dir)
	for _, file := range []string{"bin/segue-lab", "share/man/man8/segue-lab-lab-up.8.gz", "share/bash-completion/completions/segue-lab"} {
		if _, err := os.Stat(filepath.Join(dir, "usr", file)); err != nil {
			t.Error(err)
		}
	}
	if out := run(t, filepath.Join(dir, "usr/bin/segue-lab"), "version"); !strings.HasPrefix(out, "segue-lab "+earlier+"\n") {
		t.Errorf("segue-lab version: %s", out)
	}
	const list = `dpkg-deb --fsys-tarfile "$0" | tar -t | grep -v /$`
	files := map[string]bool{}
	for name := range strings.FieldsSeq(run(t, "sh", "-c", list, deb)) {
		files[name] = true
	}
	for name := range strings.FieldsSeq(run(t, "sh", "-c", list, lab)) {
		if files[name] {
			t.Errorf("both packages have %s", name)
		}
	}
}
