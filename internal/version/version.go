// Package version tells which build of segue this is.
package version

import "runtime/debug"

// revisionLength is how much of a commit's hash tells it from all others.
const revisionLength = 12

// String is the module's version as the Go toolchain recorded it: of a release its number, else
// "(devel)", and the commit that it was built from where the toolchain was allowed to ask.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return describe(info)
}

func describe(info *debug.BuildInfo) string {
	version := info.Main.Version
	if version == "" {
		version = "(devel)"
	}
	if version != "(devel)" { // it names the commit itself where it has to
		return version
	}
	var revision, dirty string
	for _, setting := range info.Settings {
		switch {
		case setting.Key == "vcs.revision":
			revision = " " + setting.Value[:min(len(setting.Value), revisionLength)]
		case setting.Key == "vcs.modified" && setting.Value == "true":
			dirty = "+dirty"
		}
	}
	if revision == "" {
		return version
	}
	return version + revision + dirty
}
