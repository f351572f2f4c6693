// SPDX-License-Identifier: Apache-2.0

package p4

import (
	"os"
	"os/exec"
	"path/filepath"
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

// The wrappers of all architectures compile, with those compilers of p4c that are in PATH. p4test
// has the front end and the middle end only.
func TestWrappersCompile(t *testing.T) {
	for _, c := range []struct {
		compiler, wrapper string
		architecture      string // its file in p4c's directory p4include
		arguments         []string
	}{
		{"p4c-bm2-ss", "v1model.p4", "v1model.p4", []string{"-o", os.DevNull}},
		{"p4c-bm2-psa", "psa.p4", "bmv2/psa.p4", []string{"-o", os.DevNull}},
		{"p4test", "psa.p4", "bmv2/psa.p4", nil},
		{"p4test", "pna.p4", "bmv2/pna.p4", nil},
		{"p4test", "tna.p4", "tna.p4", []string{"-D__TARGET_TOFINO__=1"}},
	} {
		t.Run(c.wrapper+" with "+c.compiler, func(t *testing.T) {
			t.Parallel()
			compiler, err := exec.LookPath(c.compiler)
			if err != nil {
				t.Skipf("needs %s: %v", c.compiler, err)
			}
			includes := filepath.Join(filepath.Dir(compiler), "../share/p4c/p4include")
			architecture := filepath.Join(includes, c.architecture)
			if _, err := os.Stat(architecture); err != nil {
				t.Skipf("needs the file of the architecture, which p4c installs: %v", err)
			}
			arguments := []string{"--std", "p4-16", "-I", filepath.Dir(architecture), c.wrapper}
			compile := exec.Command(compiler, append(arguments, c.arguments...)...)
			if out, err := compile.CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", c.compiler, err, out)
			}
		})
	}
}
