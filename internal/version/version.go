// Package version tells which build of segue this is.
package version

import "runtime/debug"

// String is the main module's version as the Go toolchain stamped it: that of a tag, such as v1.2.3;
// between tags a pseudo-version (https://go.dev/ref/mod#pseudo-versions), which has the commit's time
// and hash; either with +dirty if files were changed. It is "(devel)" where git could not be asked.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version
}
