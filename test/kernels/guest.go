// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// build builds the programs that a guest runs, without symbols. It returns their folder.
func build(ctx context.Context, arch string) (string, error) {
	dir := filepath.Join("bin", "kernels-"+arch)
	for _, args := range [][]string{
		{"build", "-o", dir + "/", "./cmd/segue", "./cmd/segue-lab", "./test/kernels/guest"},
		{"test", "-c", "-o", filepath.Join(dir, "balancer.test"), "./internal/balancer/dataplane"},
		{"test", "-c", "-o", filepath.Join(dir, "agent.test"), "./internal/agent"},
	} {
		args = append([]string{args[0], "-ldflags=-s -w"}, args[1:]...)
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return dir, nil
}

// modules are the kernel modules that guests load, in this order. Kernels that have one built in
// have no file of it.
var modules = []string{"llc", "stp", "bridge", "veth", "sch_ingress", "cls_bpf"}

// pack writes the initramfs. The kernel runs /init in it.
func pack(ctx context.Context, f *fetched, programs string) (string, error) {
	name := filepath.Join(programs, "initramfs")
	file, err := os.Create(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	out := bufio.NewWriterSize(file, 1<<20)
	a := &archiver{out: out}
	for _, dir := range []string{
		"bin", "dev", "etc", "modules", "proc", "root", "run", "sys", "tmp", "var", "var/lib",
	} {
		a.add(dir, fs.ModeDir|0o755, nil)
	}
	for from, to := range map[string]string{
		"guest": "init", "segue": "bin/segue", "segue-lab": "bin/segue-lab",
		"balancer.test": "bin/balancer.test", "agent.test": "bin/agent.test",
	} {
		content, err := os.ReadFile(filepath.Join(programs, from))
		if err != nil {
			return "", err
		}
		a.add(to, 0o755, content)
	}
	for i, module := range modules {
		content, err := readModule(ctx, f.root, module)
		if err != nil {
			return "", err
		}
		if content != nil {
			a.add(fmt.Sprintf("modules/%d-%s.ko", i, module), 0o644, content)
		}
	}
	a.add("TRAILER!!!", 0, nil)
	return name, errors.Join(a.err, out.Flush(), file.Close())
}

// readModule returns the content of a module's file, or nil if there is none.
func readModule(ctx context.Context, root, module string) ([]byte, error) {
	var found string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if name, _, _ := strings.Cut(d.Name(), "."); err == nil && name == module &&
			strings.HasPrefix(d.Name(), module+".ko") {
			found = path
			return fs.SkipAll
		}
		return err
	})
	if err != nil || found == "" {
		return nil, err
	}
	if !strings.HasSuffix(found, ".xz") {
		return os.ReadFile(found)
	}
	content, err := exec.CommandContext(ctx, "xz", "--decompress", "--stdout", found).Output()
	if err != nil {
		return nil, fmt.Errorf("xz %s: %w", found, err)
	}
	return content, nil
}

// archiver writes a cpio archive in the format newc (Documentation/driver-api/early-userspace/
// buffer-format.rst in the tree of Linux).
type archiver struct {
	out   io.Writer
	files int
	err   error
}

func (a *archiver) add(name string, mode fs.FileMode, content []byte) {
	a.files++
	kind := uint32(0o100000) // a regular file
	if mode.IsDir() {
		kind = 0o040000
	}
	var b bytes.Buffer
	b.WriteString("070701")
	for _, field := range []uint32{
		uint32(a.files), kind | uint32(mode.Perm()), 0, 0, 1, 0, uint32(len(content)), 0, 0, 0, 0,
		uint32(len(name) + 1), 0,
	} {
		fmt.Fprintf(&b, "%08x", field)
	}
	b.WriteString(name + "\x00")
	b.Write(make([]byte, -b.Len()&3)) // the content begins at a multiple of four
	b.Write(content)
	b.Write(make([]byte, -b.Len()&3))
	if _, err := a.out.Write(b.Bytes()); a.err == nil {
		a.err = err
	}
}

// emulators are the commands that emulate a machine, by architecture. pauth, which the processor
// max of arm64 has, is slow to emulate.
var emulators = map[string][]string{
	"amd64": {"qemu-system-x86_64", "-cpu", "max", "-append", "console=ttyS0 quiet panic=-1"},
	"arm64": {
		"qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72",
		"-append", "console=ttyAMA0 quiet panic=-1",
	},
}

// boot runs a guest until it ends. It prints the guest's console, and passes each line to read. The
// guest's clock counts instructions, and jumps to the next timer when the guest has nothing to do.
// So the guest does not see that it runs slowly, and no wait in it takes longer than it must.
func boot(ctx context.Context, arch, image, initramfs string, read func(line string)) error {
	args := append(emulators[arch][1:len(emulators[arch]):len(emulators[arch])],
		"-accel", "tcg,thread=single", "-icount", "shift=1,sleep=off", "-rtc", "clock=vm", "-smp", "1",
		"-m", "3G", "-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot",
		"-kernel", image, "-initrd", initramfs)
	cmd := exec.CommandContext(ctx, emulators[arch][0], args...)
	cmd.Stderr = os.Stderr
	console, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(console)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		fmt.Println("   ", line)
		read(line)
	}
	err = errors.Join(lines.Err(), cmd.Wait())
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
