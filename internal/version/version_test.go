// SPDX-License-Identifier: Apache-2.0

package version

import (
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/segue-lb/segue/internal/tables"
)

func TestDescribe(t *testing.T) {
	platform := runtime.GOOS + "/" + runtime.GOARCH
	for _, test := range []struct {
		settings []debug.BuildSetting
		want     Build
	}{
		{nil, Build{Version: "v1.2.3", Go: "go1.26.0", Platform: platform}},
		{
			[]debug.BuildSetting{
				{Key: "CGO_ENABLED", Value: "0"},
				{Key: "vcs.revision", Value: "c0ffee"},
				{Key: "vcs.time", Value: "2026-01-02T03:04:05Z"},
				{Key: "vcs.modified", Value: "true"},
			},
			Build{
				Version: "v1.2.3", Commit: "c0ffee", Time: "2026-01-02T03:04:05Z", Modified: true,
				Go: "go1.26.0", Platform: platform,
			},
		},
		{
			[]debug.BuildSetting{{Key: "vcs.modified", Value: "false"}},
			Build{Version: "v1.2.3", Go: "go1.26.0", Platform: platform},
		},
	} {
		info := &debug.BuildInfo{
			GoVersion: "go1.26.0", Main: debug.Module{Version: "v1.2.3"}, Settings: test.settings,
		}
		test.want.Tables = tables.Version
		if got := describe(info); got != test.want {
			t.Errorf("%v: got %+v, want %+v", test.settings, got, test.want)
		}
	}
	commit, release = "c0ffee,2026-01-02T03:04:05Z", "1.2.3+dirty"
	defer func() { commit, release = "", "" }()
	want := Build{
		Version: "1.2.3+dirty", Commit: "c0ffee", Time: "2026-01-02T03:04:05Z", Modified: true, Go: "go1.26.0",
		Platform: platform, Tables: tables.Version,
	}
	if got := describe(&debug.BuildInfo{GoVersion: "go1.26.0"}); got != want {
		t.Errorf("a build by make: got %+v, want %+v", got, want)
	}
	if b := Read(); b.Version == "" || b.Go != runtime.Version() {
		t.Errorf("this build is %+v", b)
	}
}
