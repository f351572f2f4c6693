package version

import (
	"runtime/debug"
	"testing"
)

func TestDescribe(t *testing.T) {
	vcs := []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef0123"}, {Key: "vcs.modified", Value: "true"}}
	for _, test := range []struct {
		version  string
		settings []debug.BuildSetting
		want     string
	}{
		{"v1.2.3", nil, "v1.2.3"},
		{"v1.2.4-0.20260101000000-0123456789ab+dirty", vcs, "v1.2.4-0.20260101000000-0123456789ab+dirty"},
		{"(devel)", nil, "(devel)"},
		{"", nil, "(devel)"},
		{"(devel)", vcs[:1], "(devel) 0123456789ab"},
		{"(devel)", vcs, "(devel) 0123456789ab+dirty"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: test.version}, Settings: test.settings}
		if got := describe(info); got != test.want {
			t.Errorf("%q %v: %q, want %q", test.version, test.settings, got, test.want)
		}
	}
}
