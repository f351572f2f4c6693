package scenario

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzParse: whatever a file says, it is refused or can be run.
func FuzzParse(f *testing.F) {
	f.Add(valid)
	files, err := filepath.Glob("../../../docs/examples/sim/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatalf("%d examples found, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse([]byte(text), t.TempDir())
		if err == nil && len(s.Cases) == 0 {
			t.Error("nothing to run, and no error")
		}
	})
}
