// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of log messages and of methods anew")

// logDocument lists all messages and keys.
const logDocument = "docs/reference/log.md"

// message is a row of the table: a message that the code logs, with its keys.
type message struct {
	level, text string
	keys        []string
}

func (m message) String() string {
	keys := "none"
	if len(m.keys) > 0 {
		keys = "`" + strings.Join(m.keys, "`, `") + "`"
	}
	return fmt.Sprintf("| %s | %s | %s |\n", m.level, strings.ReplaceAll(m.text, "|", `\|`), keys)
}

// isQuiet tells whether no process of a balancer or an agent runs the code of a file.
func isQuiet(name string) bool {
	return strings.HasSuffix(name, "_test.go") ||
		!strings.HasPrefix(name, "internal/") && !strings.HasPrefix(name, "cmd/segue/")
}

// inherited are the keys that the logger of a file has from Logger.With.
var inherited = map[string][]string{
	"internal/load/watcher.go": {"source", "path"},
	"internal/agent/watch.go":  {"source", "path"},
}

// attributesOf are the keys that a function returns. Attributes of a reload are a part of them.
var attributesOf = map[string][]string{
	"Attributes": {
		"bgp_changed", "changes", "keys_changed", "l2_changed", "node_changed", "passwords_changed", "peers_added", "peers_changed", "peers_removed", "servers_added", "servers_changed", "servers_removed",
		"services_added", "services_changed", "services_removed",
	},
}

// The keys of messages about changes of servers and services (internal/balancer/journal.go).
var (
	keysOfOne  = []string{"reason", "server", "service"}
	keysOfMany = []string{"count", "reason", "reasons", "servers", "services"}
)

// finder collects the messages of a file.
type finder struct {
	t        *testing.T
	name     string
	files    *token.FileSet
	function *ast.FuncDecl
	found    []message
}

func (f *finder) errorf(n ast.Node, format string, args ...any) {
	f.t.Helper()
	f.t.Errorf("%s: %s", f.files.Position(n.Pos()), fmt.Sprintf(format, args...))
}

// constant returns the value of a string, which may be a sum.
func constant(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		left, ok1 := constant(e.X)
		right, ok2 := constant(e.Y)
		return left + right, ok1 && ok2 && e.Op == token.ADD
	case *ast.ParenExpr:
		return constant(e.X)
	}
	return "", false
}

// isLogger tells whether an expression is a logger, by its name.
func isLogger(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "log" || e.Name == "logger"
	case *ast.SelectorExpr:
		return e.Sel.Name == "log" || e.Sel.Name == "Log"
	case *ast.CallExpr:
		s, ok := e.Fun.(*ast.SelectorExpr)
		return ok && s.Sel.Name == "With" && isLogger(s.X)
	}
	return false
}

// Visit implements ast.Visitor.
func (f *finder) Visit(n ast.Node) ast.Visitor {
	switch n := n.(type) {
	case *ast.FuncDecl:
		f.function = n
	case *ast.CompositeLit:
		f.wording(n)
	case *ast.CallExpr:
		f.call(n)
	}
	return f
}

// wording finds the messages about one and about many servers or services.
func (f *finder) wording(n *ast.CompositeLit) {
	kind, ok := n.Type.(*ast.Ident)
	if !ok || kind.Name != "wording" || len(n.Elts) != 2 {
		return
	}
	for i, keys := range [][]string{keysOfOne, keysOfMany} {
		text, ok := constant(n.Elts[i])
		if !ok {
			f.errorf(n, "the message is not constant")
		}
		f.found = append(f.found, message{"by cause", text, keys})
	}
}

var levels = map[string]string{"Debug": "DEBUG", "Info": "INFO", "Warn": "WARN", "Error": "ERROR"}

func (f *finder) call(n *ast.CallExpr) {
	method, ok := n.Fun.(*ast.SelectorExpr)
	if !ok || !isLogger(method.X) {
		return
	}
	level := levels[method.Sel.Name]
	if level == "" || len(n.Args) == 0 {
		if slices.Contains([]string{"Log", "LogAttrs", "InfoContext", "WarnContext", "ErrorContext"}, method.Sel.Name) &&
			f.name != "internal/balancer/journal.go" {
			f.errorf(n, "use Debug, Info, Warn or Error, so that the message can be found")
		}
		return
	}
	text, ok := constant(n.Args[0])
	if !ok {
		f.errorf(n, "the message is not constant: put what varies into attributes")
		return
	}
	keys := slices.Clone(inherited[f.name])
	rest := n.Args[1:]
	if n.Ellipsis.IsValid() {
		keys = append(keys, f.keysOf(rest[len(rest)-1])...)
		rest = rest[:len(rest)-1]
	}
	keys = append(keys, f.pairs(rest)...)
	slices.Sort(keys)
	f.found = append(f.found, message{level, text, slices.Compact(keys)})
}

// pairs returns the keys of alternating keys and values.
func (f *finder) pairs(args []ast.Expr) (keys []string) {
	for i := 0; i < len(args); i += 2 {
		key, ok := constant(args[i])
		if !ok {
			f.errorf(args[i], "the key is not constant")
		}
		keys = append(keys, key)
	}
	return keys
}

// keysOf returns the keys in a slice of attributes: a literal, a call of append, a variable of the
// function, or a function in attributesOf.
func (f *finder) keysOf(e ast.Expr) (keys []string) {
	switch e := e.(type) {
	case *ast.CompositeLit:
		return f.pairs(e.Elts)
	case *ast.CallExpr:
		if s, ok := e.Fun.(*ast.SelectorExpr); ok && attributesOf[s.Sel.Name] != nil {
			return attributesOf[s.Sel.Name]
		}
		if name, ok := e.Fun.(*ast.Ident); ok && name.Name == "append" {
			return append(f.keysOf(e.Args[0]), f.pairs(e.Args[1:])...)
		}
	case *ast.Ident:
		ast.Inspect(f.function, func(n ast.Node) bool {
			a, ok := n.(*ast.AssignStmt)
			if !ok || len(a.Lhs) != 1 || len(a.Rhs) != 1 {
				return true
			}
			if to, ok := a.Lhs[0].(*ast.Ident); !ok || to.Name != e.Name {
				return true
			}
			if call, ok := a.Rhs[0].(*ast.CallExpr); ok { // x = append(x, …)
				keys = append(keys, f.pairs(call.Args[1:])...)
			} else {
				keys = append(keys, f.keysOf(a.Rhs[0])...)
			}
			return true
		})
		if keys != nil {
			return keys
		}
	}
	f.errorf(e, "the keys cannot be found")
	return nil
}

// messages returns all messages of the code, sorted.
func messages(t *testing.T) (all []message) {
	for _, name := range files(t, ".go") {
		if isQuiet(name) {
			continue
		}
		f := &finder{t: t, name: name, files: token.NewFileSet()}
		tree, err := parser.ParseFile(f.files, path.Join(root, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Walk(f, tree)
		all = append(all, f.found...)
	}
	slices.SortFunc(all, func(a, b message) int {
		return strings.Compare(strings.ToLower(a.text)+a.String(), strings.ToLower(b.text)+b.String())
	})
	return slices.CompactFunc(all, func(a, b message) bool { return a.String() == b.String() })
}

// TestLogMessages compares the table of messages with the code. So no message and no key changes
// unnoticed.
func TestLogMessages(t *testing.T) {
	var rows strings.Builder
	for _, m := range messages(t) {
		rows.WriteString(m.String())
	}
	text := read(t, logDocument)
	const head = "| level | message | keys |\n|---|---|---|\n"
	before, table, found := strings.Cut(text, head)
	if !found {
		t.Fatalf("%s has no table of messages", logDocument)
	}
	table, after, _ := strings.Cut(table, "\n\n")
	if *update {
		content := before + head + strings.TrimSuffix(rows.String(), "\n")
		if after != "" {
			content += "\n\n" + after
		} else {
			content += "\n"
		}
		if err := os.WriteFile(path.Join(root, logDocument), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want := strings.Split(strings.TrimSuffix(rows.String(), "\n"), "\n")
	got := strings.Split(strings.TrimSuffix(table, "\n"), "\n")
	for _, row := range want {
		if !slices.Contains(got, row) {
			t.Errorf("%s has no row\n%s", logDocument, row)
		}
	}
	for _, row := range got {
		if !slices.Contains(want, row) {
			t.Errorf("the code has no message as in the row\n%s", row)
		}
	}
	if t.Failed() {
		t.Error("if the change is wanted, note it in CHANGELOG.md, and write the table by: go test ./test/docs -update")
	}
}

var logKey = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// TestLogKeys checks that the documentation explains each key, and no others.
func TestLogKeys(t *testing.T) {
	var keys []string
	for _, m := range messages(t) {
		keys = append(keys, m.keys...)
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	var explained []string
	_, chapter, _ := strings.Cut(read(t, logDocument), "\n## Keys\n")
	chapter, _, _ = strings.Cut(chapter, "\n## ")
	for line := range strings.Lines(chapter) {
		if cell, ok := strings.CutPrefix(line, "| `"); ok {
			cell, _, _ = strings.Cut(cell, " |")
			for name := range strings.SplitSeq(strings.TrimSuffix(cell, "`"), "`, `") {
				explained = append(explained, name)
			}
		}
	}
	for _, key := range keys {
		if !logKey.MatchString(key) {
			t.Errorf("key %q: must be lower-case letters, digits and underscores", key)
		}
		if !slices.Contains(explained, key) {
			t.Errorf("%s does not explain the key %s", logDocument, key)
		}
	}
	for _, key := range explained {
		if !slices.Contains(keys, key) {
			t.Errorf("%s explains the key %s, which no message has", logDocument, key)
		}
	}
}
