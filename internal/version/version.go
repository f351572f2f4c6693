// SPDX-License-Identifier: Apache-2.0

// Package version describes the build of the running program.
package version

import (
	"cmp"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/segue-lb/segue/internal/tables"
)

// The Makefile makes the linker set these variables. In a build without make or without git, they
// are empty.
var (
	release string // the version
	commit  string // HASH,TIME
)

// dirty is the end of the version if files were changed after the commit (scripts/version.sh).
const dirty = "+dirty"

// Build describes a build. Unknown fields are empty.
type Build struct {
	// Version is the version that scripts/version.sh prints: 1.2.3 for git's tag v1.2.3. A build
	// without make has the version that the Go toolchain stamped: v1.2.3, or a pseudo-version
	// (https://go.dev/ref/mod#pseudo-versions). If the build used neither make nor git, it is
	// "(devel)".
	Version string `json:"version"`
	// Commit is the hash of the commit that was built. Time is the time of that commit, as RFC
	// 3339.
	Commit string `json:"commit,omitempty"`
	Time   string `json:"time,omitempty"`
	// Modified tells that files were changed after the commit.
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`       // the version of the Go toolchain
	Platform string `json:"platform"` // operating system and architecture, such as linux/amd64
	// Tables is the version of the candidate tables (tables.Version). All balancers of a service
	// need builds with the same version.
	Tables int `json:"tables"`
}

// String returns the version of the running program's build.
func String() string { return Read().Version }

// Read returns what the linker and the Go toolchain stamped into the running program.
func Read() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{
			GoVersion: runtime.Version(), Main: debug.Module{Version: "unknown"},
		}
	}
	return describe(info)
}

// describe returns the values that the linker has set. For a value that the linker has not set, it
// takes that of the Go toolchain.
func describe(info *debug.BuildInfo) Build {
	b := Build{
		Version: cmp.Or(release, info.Main.Version), Go: info.GoVersion,
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Tables: tables.Version,
	}
	if hash, time, ok := strings.Cut(commit, ","); ok {
		b.Commit, b.Time, b.Modified = hash, time, strings.HasSuffix(release, dirty)
		return b
	}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			b.Commit = setting.Value
		case "vcs.time":
			b.Time = setting.Value
		case "vcs.modified":
			b.Modified = setting.Value == "true"
		}
	}
	return b
}
