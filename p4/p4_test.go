// SPDX-License-Identifier: Apache-2.0

package p4

import (
	"os"
	"strings"
	"testing"
)

// The compiled program is that of the source.
func TestCompiledFilesAreOfTheSource(t *testing.T) {
	noted, err := os.ReadFile("v1model.sha256")
	if err != nil {
		t.Fatal(err)
	}
	if want := Digest(); strings.TrimSpace(string(noted)) != want {
		t.Errorf("v1model.json and v1model.p4info.txtpb are of another source: compile it (p4.go), and write %s to v1model.sha256", want)
	}
}
