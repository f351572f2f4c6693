// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/tlsfiles"
)

// Host is what rules read from the host, apart from files. Rules that read the host find nothing if
// the host lacks the interface or the file.
type Host struct {
	// MTU returns the MTU of an interface in bytes, or false if the host does not have it.
	MTU func(name string) (mtu int, ok bool)
	// Driver returns the name of an interface's driver, as `ethtool -i` shows it, or an empty text.
	Driver func(name string) string
}

// ThisHost returns the host of the process, in its network namespace.
func ThisHost() Host {
	return Host{Driver: driverOf, MTU: func(name string) (int, bool) {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return 0, false
		}
		return i.MTU, true
	}}
}

func driverOf(name string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	info, err := unix.IoctlGetEthtoolDrvinfo(fd, name)
	if err != nil {
		return ""
	}
	return unix.ByteSliceToString(info.Driver[:])
}

// keyFile finds a key file that a start or a reload would refuse.
func (i *inspection) keyFile(file string) {
	if file == "" || unix.Access(file, unix.R_OK) != nil { // there is no file, or it is not readable
		return
	}
	var problem *fieldpath.Error
	if _, err := ReadSignalKeys(file); errors.As(err, &problem) {
		i.findf(desired.SignalKeyField, "a start would fail, because the file is not right: %s; mend the file",
			problem.Problem)
	}
}

// passwordFile finds a password file of a BGP peer that a start or a reload would refuse.
func (i *inspection) passwordFile(path, file string) {
	if file == "" || unix.Access(file, unix.R_OK) != nil {
		return
	}
	if _, err := readPassword(file); err != nil {
		i.findf(path, "a start would fail, because the file is not right: %s; mend the file", err)
	}
}

// tlsFiles finds files in a section with which no connection by TLS is possible.
func (i *inspection) tlsFiles(path string, f *desired.TLSFiles) {
	for _, file := range []string{f.CAFile, f.CertFile, f.KeyFile} {
		if file != "" && unix.Access(file, unix.R_OK) != nil {
			return
		}
	}
	if _, err := tlsfiles.Client(path, f); err != nil {
		i.findf(path, "no connection is possible, because a file is not right: %s; mend the file", err)
	}
}

// invalidOverrides finds overrides that a start would leave out.
func (i *inspection) invalidOverrides(file string) {
	if file == "" || unix.Access(file, unix.R_OK) != nil {
		return
	}
	for _, o := range i.invalid {
		for _, problem := range o.Problems {
			found := *problem
			found.Problem += ": a reload is refused, and a start leaves the override out; correct the file, or " +
				"edit the override"
			i.findings = append(i.findings, Finding{&found, i.rule})
		}
	}
}

// writable finds a file or directory that users other than root and the user of this process can
// change or replace. path is the field that names the file; it is empty for the configuration file
// itself. what says what such a user could change.
func (i *inspection) writable(path, file, what string) {
	if who := writers(file, trustRoot); who != "" {
		i.findf(path, "%s, and so change %s; let only root write there", who, what)
	}
}

// writableByOthers does the same as writable, but permits the owner of the file, too. It is for
// files of the balancer's or agent's user, who need not be root: the state directory, and files
// that only their owner may read.
func (i *inspection) writableByOthers(path, file, what string) {
	if who := writers(file, trustOwner); who != "" {
		i.findf(path, "%s, and so change %s; let only the user of the process write there", who, what)
	}
}

// writableByAll finds a file that all users can change or replace. It is for a file that an
// application writes, as any user.
func (i *inspection) writableByAll(path, file, what string) {
	if who := writers(file, trustSome); who != "" {
		i.findf(path, "%s, and so change %s; let only the application write there", who, what)
	}
}

const (
	othersMayWrite = 0o002
	groupMayWrite  = 0o020
)

// trust says which users may change a file.
type trust int

const (
	trustRoot  trust = iota // root, and the user of this process
	trustOwner              // these, and the owner of the file itself
	trustSome               // each owner and each group: only the permissions for all users matter
)

// writers says which untrusted users can change or replace a file. It considers the permissions of
// the file and of all directories above it. writers returns an empty text if there are no such
// users, or if the file does not exist.
func writers(file string, trusted trust) string {
	if file == "" {
		return ""
	}
	file, err := filepath.Abs(file)
	if err != nil {
		return ""
	}
	target, err := filepath.EvalSymlinks(file)
	if err != nil {
		return ""
	}
	// If the file is a link, the directory of the link matters, too: there the link can be replaced.
	for _, path := range []string{target, filepath.Dir(file)} {
		for {
			info, err := os.Stat(path)
			if err != nil {
				return ""
			}
			if who := writer(info, path != target, trusted); who != "" {
				return fmt.Sprintf("%s can write to %s", who, path)
			}
			if path == "/" {
				break
			}
			path = filepath.Dir(path)
		}
	}
	return ""
}

// writer names the untrusted users that can write to a file. If isAbove is true, info is about a
// directory above the file, and writer names the users that can replace a file in it. In a sticky
// directory, only the owner of a file can replace it.
func writer(info fs.FileInfo, isAbove bool, trusted trust) string {
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	isSticky := isAbove && info.Mode()&fs.ModeSticky != 0
	permits := func(write fs.FileMode) bool { return info.Mode().Perm()&write != 0 && !isSticky }
	trustsOwner := owner.Uid == 0 || int(owner.Uid) == os.Geteuid() || trusted == trustOwner && !isAbove
	switch {
	case permits(othersMayWrite):
		return "any user of this host"
	case trusted == trustSome:
		return ""
	case permits(groupMayWrite) && owner.Gid != 0:
		return fmt.Sprintf("the group %d", owner.Gid)
	case !trustsOwner:
		return fmt.Sprintf("the user %d", owner.Uid)
	}
	return ""
}

// isVolatile tells whether a directory usually loses its content at a reboot.
func isVolatile(dir string) bool {
	for _, volatile := range []string{"/run", "/var/run", "/tmp", "/dev"} {
		if dir == volatile || strings.HasPrefix(dir, volatile+"/") {
			return true
		}
	}
	return false
}

// isUnspecified tells whether a listener at ADDRESS:PORT listens on all addresses of the host.
func isUnspecified(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	address, err := netip.ParseAddr(host)
	return host == "" || err == nil && address.IsUnspecified()
}
