// SPDX-License-Identifier: Apache-2.0

// Package version tells which build of segue this is.
package version

import (
	"cmp"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/segue-lb/segue/internal/tables"
)

// The linker sets these (Makefile). They are empty in builds without make, and without git.
var (
	release string // the version
	commit  string // HASH,TIME
)

// dirty ends the version of a build of changed files (scripts/version.sh).
const dirty = "+dirty"

// Build describes a build. Unknown fields are empty.
type Build struct {
	// Version is the version by git's tags, as scripts/version.sh prints it: 1.2.3 for the tag
	// v1.2.3. A build without make has the version that the Go toolchain stamped: v1.2.3, or a
	// pseudo-version (https://go.dev/ref/mod#pseudo-versions). It is "(devel)" if the build did not
	// use git.
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
