// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"testing"

	"github.com/segue-lb/segue/internal/version"
)

func TestPrintVersion(t *testing.T) {
	known := version.Build{
		Version: "v0.4.1-0.20260102030405-c0ffee123456+dirty",
		Commit:  "c0ffee1234567890c0ffee1234567890c0ffee12", Time: "2026-01-02T03:04:05Z",
		Modified: true, Go: "go1.26.0", Platform: "linux/amd64", Tables: 3,
	}
	unknown := version.Build{Version: "(devel)", Go: "go1.26.0", Platform: "linux/arm64", Tables: 3}
	for _, c := range []struct {
		build version.Build
		want  string
	}{
		{known, `program v0.4.1-0.20260102030405-c0ffee123456+dirty
commit: c0ffee1234567890c0ffee1234567890c0ffee12, 2026-01-02T03:04:05Z, with uncommitted changes
built with: go1.26.0 for linux/amd64
candidate tables: version 3
`},
		{unknown, `program (devel)
commit: unknown: it was built without git
built with: go1.26.0 for linux/arm64
candidate tables: version 3
`},
	} {
		var output bytes.Buffer
		if err := printVersion(&output, "program", c.build); err != nil || output.String() != c.want {
			t.Errorf("%v, printed\n%s\nwant\n%s", err, output.String(), c.want)
		}
	}
	const asJSON = `{
  "version": "v0.4.1-0.20260102030405-c0ffee123456+dirty",
  "commit": "c0ffee1234567890c0ffee1234567890c0ffee12",
  "time": "2026-01-02T03:04:05Z",
  "modified": true,
  "go": "go1.26.0",
  "platform": "linux/amd64",
  "tables": 3
}
`
	var output bytes.Buffer
	if err := PrintJSON(&output, known); err != nil || output.String() != asJSON {
		t.Errorf("%v, printed\n%s\nwant\n%s", err, output.String(), asJSON)
	}
}
