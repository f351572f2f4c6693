// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// cache is the folder of the kernels, one folder for each.
const cache = ".tools/kernels"

// keyring has the keys of Debian's archive.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// fetched is an unpacked kernel.
type fetched struct {
	version string // of the package
	root    string // the folder with the packages' files
	image   string // the kernel's file
}

// fetch downloads and unpacks the kernel. It does not touch the packages of the machine: apt works
// with lists and a state of its own. The flavour cloud is small, and has all that guests need.
func (k kernel) fetch(ctx context.Context) (*fetched, error) {
	dir, err := filepath.Abs(filepath.Join(cache, k.name))
	if err != nil {
		return nil, err
	}
	a := apt{dir: dir}
	if err := a.prepare(ctx, k); err != nil {
		return nil, err
	}
	if _, err := a.run(ctx, "apt-get", "-qq", "update"); err != nil {
		return nil, err
	}
	meta := "linux-image-cloud-" + k.arch
	version, err := a.candidate(ctx, meta)
	if err != nil {
		return nil, err
	}
	f := &fetched{version: version, root: filepath.Join(dir, "root-"+version)}
	if _, err := os.Stat(f.root); errors.Is(err, os.ErrNotExist) {
		if err := a.unpack(ctx, meta, f.root); err != nil {
			return nil, err
		}
	}
	// Newer packages have the kernel beside its modules.
	for _, pattern := range []string{"boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz"} {
		if found, _ := filepath.Glob(filepath.Join(f.root, pattern)); len(found) > 0 {
			f.image = found[0]
			return f, nil
		}
	}
	return nil, fmt.Errorf("%s: has no kernel", f.root)
}

// apt is an apt with lists and a state of its own.
type apt struct{ dir string }

// prepare writes the configuration.
func (a apt) prepare(ctx context.Context, k kernel) error {
	var sources strings.Builder
	for _, s := range k.suites {
		site, err := archive(ctx, s.isSecurity)
		if err != nil {
			return err
		}
		fmt.Fprintf(&sources, "deb [arch=%s signed-by=%s] %s %s main\n", k.arch, keyring, site, s.name)
	}
	config := fmt.Sprintf(`Dir::State "%[1]s/state";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s/cache";
Dir::Etc::sourcelist "%[1]s/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferences "%[1]s/preferences";
Dir::Etc::preferencesparts "-";
APT::Architecture "%[2]s";
APT::Architectures { "%[2]s"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
`, a.dir, k.arch)
	// By default, apt prefers old versions of some suites.
	const preferences = "Package: *\nPin: release *\nPin-Priority: 500\n"
	for _, folder := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, folder), 0o755); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"sources.list": sources.String(), "apt.conf": config, "preferences": preferences, "status": "",
	} {
		if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// archive returns the address of Debian's archive, or of its security archive, that the machine's
// own apt uses.
func archive(ctx context.Context, isSecurity bool) (string, error) {
	label := map[bool]string{true: "Debian-Security", false: "Debian"}[isSecurity]
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(LABEL) $(SITE)",
		"Created-By: Packages", "Origin: Debian").Output()
	if err != nil {
		return "", fmt.Errorf("apt-get indextargets: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		if site, ok := strings.CutPrefix(line, label+" "); ok {
			return strings.TrimSpace(site), nil
		}
	}
	return "", fmt.Errorf("this machine's apt has no source with the label %s; run apt-get update, "+
		"or add one", label)
}

var candidateLine = regexp.MustCompile(`Candidate: (\S+)`)

// candidate returns the newest version of a package.
func (a apt) candidate(ctx context.Context, name string) (string, error) {
	out, err := a.run(ctx, "apt-cache", "policy", name)
	if err != nil {
		return "", err
	}
	match := candidateLine.FindStringSubmatch(out)
	if match == nil || match[1] == "(none)" {
		return "", fmt.Errorf("the suites have no package %s", name)
	}
	return match[1], nil
}

var kernelPackage = regexp.MustCompile(`(?m)^ +Depends: (linux-(?:image|binary|modules)-\S+)`)

// unpack downloads the packages that a package of a kernel depends on, and unpacks them into a
// folder.
func (a apt) unpack(ctx context.Context, meta, root string) error {
	names := []string{meta}
	for i := 0; i < len(names); i++ { // the list grows
		out, err := a.run(ctx, "apt-cache", "depends", names[i])
		if err != nil {
			return err
		}
		for _, match := range kernelPackage.FindAllStringSubmatch(out, -1) {
			names = append(names, match[1])
		}
	}
	fmt.Printf("kernels: downloading %s\n", strings.Join(names[1:], ", "))
	downloads, err := os.MkdirTemp(a.dir, "downloads")
	if err != nil {
		return err
	}
	defer os.RemoveAll(downloads)
	download := append([]string{"-qq", "download"}, names[1:]...)
	if _, err := a.runIn(ctx, downloads, "apt-get", download...); err != nil {
		return err
	}
	packages, err := filepath.Glob(filepath.Join(downloads, "*.deb"))
	if err != nil {
		return err
	}
	partial := filepath.Join(downloads, "root")
	for _, p := range packages {
		if _, err := a.run(ctx, "dpkg-deb", "-x", p, partial); err != nil {
			return err
		}
	}
	return os.Rename(partial, root)
}

func (a apt) run(ctx context.Context, command string, args ...string) (string, error) {
	return a.runIn(ctx, a.dir, command, args...)
}

func (a apt) runIn(ctx context.Context, dir, command string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "APT_CONFIG="+filepath.Join(a.dir, "apt.conf"), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out), nil
}
