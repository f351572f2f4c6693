// SPDX-License-Identifier: Apache-2.0

// Package version tells which build of segue this is.
package version

import (
	"runtime"
	"runtime/debug"

	"github.com/segue-lb/segue/internal/tables"
)

// Build is what is known of a build. Fields that are not known are empty.
type Build struct {
	// Version is the main module's version as the Go toolchain stamped it: that of a tag, such as
	// v1.2.3; between tags a pseudo-version (https://go.dev/ref/mod#pseudo-versions), which has the
	// commit's time and hash; either with +dirty if files were changed. It is "(devel)" where git
	// could not be asked.
	Version string `json:"version"`
	// Commit is the hash of the commit that the files were of, and Time its time, by RFC 3339.
	Commit string `json:"commit,omitempty"`
	Time   string `json:"time,omitempty"`
	// Modified tells that files were changed since the commit.
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`       // the version of the Go toolchain
	Platform string `json:"platform"` // operating system and architecture, such as linux/amd64
	// Tables is the version of the candidate tables (tables.Version). Balancers of one service
	// need builds of the same one.
	Tables int `json:"tables"`
}

// String is the version of the running program's build.
func String() string { return Read().Version }

// Read returns what the running program's build was stamped with.
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
		Version: info.Main.Version, Go: info.GoVersion,
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Tables: tables.Version,
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
