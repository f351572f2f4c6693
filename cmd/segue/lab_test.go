package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLabRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topology.yaml")
	if err := os.WriteFile(file, []byte("servers: 1000\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ args, err string }{
		{"up -f " + file, file + `:1: servers "1000": must be 1 to 128`},
		{"up -f " + file + ".none", "no such file"},
		{"up --name my-lab", `name "my-lab": must be`},
		{"demo extra", `lab demo: unexpected argument "extra"`},
		{"status --name nosuchlab", `lab "nosuchlab" is not up`},
		{"exec --name nosuchlab s1 -- true", `lab "nosuchlab" is not up`},
		{"exec", "lab exec: missing NODE"},
		{"impair --name nosuchlab", `lab "nosuchlab" is not up`},
		{"impair --drop 5", `--drop "5": must be a share from 0% to 100%, such as 5%`},
		{"down --name ../x", `name "../x": must be`},
	} {
		root := newRoot()
		root.SetOut(new(bytes.Buffer))
		root.SetArgs(append([]string{"lab"}, strings.Fields(test.args)...))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("lab %s: %v, want %s", test.args, err, test.err)
		}
	}
}

// A lab that is not complete is up, or nobody would take it down.
func TestLabList(t *testing.T) {
	name := fmt.Sprintf("list%d", os.Getpid())
	dir := filepath.Join("/run/segue/lab", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skipf("labs need root: %v", err)
	}
	list := func() []string {
		t.Helper()
		var output bytes.Buffer
		root := newRoot()
		root.SetOut(&output)
		root.SetArgs([]string{"lab", "list"})
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		return strings.Split(output.String(), "\n")
	}
	if names := list(); !slices.Contains(names, name) {
		t.Errorf("%q, want %s among them", names, name)
	}
	for ; os.Remove(dir) == nil; dir = filepath.Dir(dir) { // as long as it is empty
	}
	if names := list(); slices.Contains(names, name) {
		t.Errorf("%q, want no %s", names, name)
	}
}

func TestLabDownOfNothing(t *testing.T) {
	var output bytes.Buffer
	root := newRoot()
	root.SetOut(&output)
	root.SetArgs([]string{"lab", "down", "--name", "nosuchlab"})
	if err := root.Execute(); err != nil || output.String() != "Lab nosuchlab is down.\n" {
		t.Errorf("%q, %v", output.String(), err)
	}
}
