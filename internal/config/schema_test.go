// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

var update = flag.Bool("update", false, "write the schemas of the configuration files anew")

// project is the folder of the whole project.
const project = "../../"

// configurationPage has a heading for each field of the configuration files.
const configurationPage = "docs/reference/configuration.md"

// fileKind is a kind of configuration file.
type fileKind struct {
	role    string // names the schema, and the role in segue check --role
	chapter string // of configurationPage
	top     reflect.Type
}

var fileKinds = []fileKind{
	{"lb", "The balancer's file", reflect.TypeFor[desired.Balancer]()},
	{"agent", "The agent's file", reflect.TypeFor[desired.Agent]()},
}

func (k fileKind) schemaFile() string { return "packaging/schema/" + k.role + ".schema.json" }

func readProject(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(project + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// schema is a JSON Schema, as far as the configuration needs it.
type schema map[string]any

// Texts that the decoder of the configuration takes for a value of a type.
const (
	addressText  = `^[0-9A-Fa-f:.]*$`
	prefixText   = `^([0-9A-Fa-f:.]+/[0-9]+)?$`
	durationText = `^(0|-?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$`
	numberText   = `^-?(0[xXbBoO])?[0-9A-Fa-f_]+$`
)

func matching(pattern string) schema {
	return schema{"type": []string{"string", "null"}, "pattern": pattern}
}

// numbers returns the schema of a number: as JSON has it, or in one of YAML's other forms.
func numbers(kind string, limits schema) schema {
	number := schema{"type": []string{kind, "null"}}
	for key, value := range limits {
		number[key] = value
	}
	return schema{"anyOf": []schema{number, {"type": "string", "pattern": numberText}}}
}

// schemer derives the schema of a file from the Go type, and the descriptions from the page.
type schemer struct {
	t       *testing.T
	page    map[string]string   // the text about each field by its path
	values  map[string][]string // the constants of each type of package desired
	reached []string            // paths of fields
}

func (s *schemer) of(at string, typ reflect.Type, bounds string) schema {
	switch typ {
	case reflect.TypeFor[netip.Addr]():
		return matching(addressText)
	case reflect.TypeFor[netip.Prefix]():
		return matching(prefixText)
	case reflect.TypeFor[time.Duration]():
		return schema{"anyOf": []schema{matching(durationText), {"const": 0}}}
	case reflect.TypeFor[desired.Port]():
		port := numbers("integer", schema{"minimum": 1, "maximum": 65535})
		port["anyOf"] = append(port["anyOf"].([]schema), schema{"const": "all"})
		return port
	}
	if values := s.values[typ.Name()]; typ.Kind() == reflect.String && len(values) > 0 && typ.Name() != "Community" {
		for _, value := range values {
			if about := s.page[at]; about != "" && !strings.Contains(about, value) && !strings.Contains(about, "As ") {
				s.t.Errorf("%s: %s does not have the value %q", configurationPage, at, value)
			}
		}
		all := []any{nil}
		for _, value := range values {
			all = append(all, value)
		}
		return schema{"enum": all}
	}
	return s.ofKind(at, typ, bounds)
}

func (s *schemer) ofKind(at string, typ reflect.Type, bounds string) schema {
	limits := schema{}
	if bounds != "" {
		b := fieldpath.ParseBounds(bounds)
		limits["minimum"], limits["maximum"] = b.Low, b.High
	} else if strings.HasPrefix(typ.Kind().String(), "uint") {
		limits["minimum"], limits["maximum"] = 0, uint64(math.MaxUint64)>>(64-typ.Bits())
	}
	switch typ.Kind() {
	case reflect.Pointer:
		return s.of(at, typ.Elem(), bounds)
	case reflect.Struct:
		return s.ofStruct(at, typ)
	case reflect.Slice:
		return schema{"type": []string{"array", "null"}, "items": s.of(at+"[]", typ.Elem(), "")}
	case reflect.String:
		return schema{"type": []string{"string", "number", "boolean", "null"}}
	case reflect.Bool:
		return schema{"type": []string{"boolean", "null"}}
	case reflect.Float64:
		return numbers("number", limits)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Int:
		return numbers("integer", limits)
	}
	s.t.Fatalf("%s: no schema for a %s", at, typ)
	return nil
}

var linkedText = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)

func (s *schemer) ofStruct(at string, typ reflect.Type) schema {
	properties := schema{}
	required := []string{}
	for _, f := range reflect.VisibleFields(typ) {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "" || name == "-" {
			continue
		}
		inner := strings.TrimPrefix(at+"."+name, ".")
		if inner == "services[].health.http.verify" {
			continue // the type is shared with https, the only check with certificates
		}
		s.reached = append(s.reached, inner)
		property := s.of(inner, f.Type, f.Tag.Get("range"))
		if about := s.page[inner]; about != "" {
			property["description"] = linkedText.ReplaceAllString(about, "$1")
			if strings.Contains(about, ". Required.") {
				required = append(required, name)
			}
		}
		properties[name] = property
	}
	object := schema{"type": []string{"object", "null"}, "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		object["required"] = required
	}
	return object
}

// constantsByType returns the constants of the types of package desired, such as hash of Placement.
func constantsByType(t *testing.T) map[string][]string {
	t.Helper()
	names, err := filepath.Glob("../desired/*.go")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]string{}
	for _, name := range names {
		tree, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			typ, isNamed := spec.Type.(*ast.Ident)
			if value, ok := spec.Values[0].(*ast.BasicLit); ok && isNamed && value.Kind == token.STRING {
				text, err := strconv.Unquote(value.Value)
				if err != nil {
					t.Fatal(err)
				}
				values[typ.Name] = append(values[typ.Name], text)
			}
			return true
		})
	}
	return values
}

var fieldHeading = regexp.MustCompile("^#{3,4} `([^`]+)`$")

// fieldsOfPage returns the texts below the headings of fields in a chapter, and the headings.
func fieldsOfPage(text, chapter string) (about map[string]string, headings []string) {
	_, text, _ = strings.Cut(text, "\n## "+chapter+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	about = map[string]string{}
	at := ""
	for line := range strings.SplitSeq(text, "\n") {
		if match := fieldHeading.FindStringSubmatch(line); match != nil {
			at = match[1]
			headings = append(headings, at)
		} else if strings.HasPrefix(line, "#") {
			at = ""
		} else if at != "" {
			about[at] += line + "\n"
		}
	}
	for at := range about {
		about[at] = strings.TrimSpace(about[at])
	}
	return about, headings
}

// isExplained tells whether the page has a heading of a field, of a field in it, or of a field that
// contains it and that is explained as a whole (former-quic).
func isExplained(at string, headings []string) bool {
	return slices.ContainsFunc(headings, func(h string) bool {
		return h == at || strings.HasPrefix(h, at+".") || strings.HasPrefix(h, at+"[]")
	})
}

// TestConfigurationSchema compares the schemas of the configuration files with the Go types, and
// the headings of the reference with the fields.
func TestConfigurationSchema(t *testing.T) {
	values := constantsByType(t)
	for _, kind := range fileKinds {
		about, headings := fieldsOfPage(readProject(t, configurationPage), kind.chapter)
		s := &schemer{t: t, page: about, values: values}
		whole := s.of("", kind.top, "")
		whole["$schema"] = "http://json-schema.org/draft-07/schema#"
		whole["title"] = "Segue: " + kind.chapter
		for _, at := range s.reached {
			parent := fieldpath.Parent(at)
			isWhole := about[parent] != "" && !slices.ContainsFunc(headings, func(h string) bool { return strings.HasPrefix(h, parent+".") })
			if !isExplained(at, headings) && !isWhole {
				t.Errorf("%s, %s: no heading `%s`", configurationPage, kind.chapter, at)
			}
		}
		for _, h := range headings {
			if !slices.Contains(s.reached, h) {
				t.Errorf("%s, %s: `%s` is no field", configurationPage, kind.chapter, h)
			}
		}
		content, err := json.MarshalIndent(whole, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		content = append(content, '\n')
		if *update {
			if err := os.WriteFile(project+kind.schemaFile(), content, 0o644); err != nil {
				t.Fatal(err)
			}
		} else if readProject(t, kind.schemaFile()) != string(content) {
			t.Errorf("%s differs from the types; write it by: go test ./internal/config -run Schema -update", kind.schemaFile())
		}
	}
}

// schemaOf reads the schema of a kind of file.
func schemaOf(t *testing.T, kind fileKind) (s map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(readProject(t, kind.schemaFile())), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// plainValue returns a text in YAML as JSON has it.
func plainValue(text string) (value any, err error) {
	if err := yaml.Unmarshal([]byte(text), &value); err != nil {
		return nil, err
	}
	content, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	err = json.Unmarshal(content, &value)
	return value, err
}

// invalidText returns the first difference between a file and the schema of its kind.
func invalidText(t *testing.T, kind fileKind, text string) string {
	t.Helper()
	value, err := plainValue(text)
	if err != nil {
		return err.Error()
	}
	return invalid("", value, schemaOf(t, kind))
}

var (
	heredoc    = regexp.MustCompile(`(?ms)^ *cat > ?\S*(?:lb|agent)\S*\.yaml <<-?'?[A-Z]+'?\n(.*?)^ *(?:EOF|END)$`)
	codeBlocks = regexp.MustCompile(`(?m)(?:^    .*\n|^\n)+`)
)

// elision matches a line that stands for others.
var elision = regexp.MustCompile(`(?m)^ *\.\.\.$`)

// configurationsIn returns the configurations in a page: here documents, and blocks of code that
// begin with a section of a file. They may be parts of a file.
func configurationsIn(page string) (all []string) {
	for _, block := range codeBlocks.FindAllString(page, -1) {
		block = strings.ReplaceAll(strings.Trim("\n"+block, "\n"), "\n    ", "\n")
		block = strings.TrimPrefix(block, "    ")
		for _, match := range heredoc.FindAllStringSubmatch(block, -1) {
			all = append(all, strings.ReplaceAll(match[1], "$N", "1")) // N is the number of the host
		}
		for _, section := range []string{"node:", "services:", "bgp:", "store:", "poll:", "metrics:"} {
			if strings.HasPrefix(block, section) && !elision.MatchString(block) {
				all = append(all, block)
			}
		}
	}
	return all
}

// TestSchemaTakesTheDocumentation checks all examples and all configurations in the documentation.
func TestSchemaTakesTheDocumentation(t *testing.T) {
	for file, kind := range map[string]fileKind{
		"lb.yaml": fileKinds[0], "lb-infer.yaml": fileKinds[0], "agent.yaml": fileKinds[1],
	} {
		if problem := invalidText(t, kind, readProject(t, "docs/examples/"+file)); problem != "" {
			t.Errorf("docs/examples/%s: %s", file, problem)
		}
	}
	pages, err := filepath.Glob(project + "docs/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(pages, project+"README.md") {
		for _, text := range configurationsIn(readProject(t, strings.TrimPrefix(page, project))) {
			found++
			lb, agent := invalidText(t, fileKinds[0], text), invalidText(t, fileKinds[1], text)
			if lb != "" && agent != "" && !strings.HasSuffix(lb, ": required") && !strings.HasSuffix(agent, ": required") {
				t.Errorf("%s: a balancer's file: %s; an agent's file: %s\n%s", page, lb, agent, text)
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d configurations were found in the documentation", found)
	}
}

// formProblems begin the errors about a field that does not exist, or that has another type.
var formProblems = regexp.MustCompile(`^(unknown field|must be (a list|a mapping|true or false|a whole number from|` +
	`an IP address|a prefix such as|a duration with|a port from 1 to 65535, or all|a single value))`)

var leadingZero = regexp.MustCompile(`: 0[0-9]`)

// checkSchema compares what the schema says of a file with the problems that the decoder found.
func checkSchema(t *testing.T, top reflect.Type, text string, problems []problem) {
	t.Helper()
	for _, kind := range fileKinds {
		if kind.top != top {
			continue
		}
		if _, err := plainValue(text); err != nil || leadingZero.MatchString(text) {
			continue // no YAML, or a number that YAML takes and the decoder does not
		}
		isForm := slices.ContainsFunc(problems, func(p problem) bool { return formProblems.MatchString(p.Problem) })
		switch got := invalidText(t, kind, text); {
		case len(problems) == 0 && got != "":
			t.Errorf("the schema refuses a valid file: %s", got)
		case isForm && got == "":
			t.Errorf("the schema takes a file with these problems: %v", problems)
		}
	}
}

// invalid returns the first difference between a value and a schema, or an empty text. It knows
// what schemer writes.
func invalid(at string, value any, s map[string]any) string {
	if options, ok := s["anyOf"].([]any); ok {
		problems := ""
		for _, option := range options {
			problem := invalid(at, value, option.(map[string]any))
			if problem == "" {
				return ""
			}
			problems = problem
		}
		return problems
	}
	if c, ok := s["const"]; ok && fmt.Sprint(c) != fmt.Sprint(value) {
		return fmt.Sprintf("%s: %v is not %v", at, value, c)
	}
	if all, ok := s["enum"].([]any); ok && !slices.Contains(all, value) {
		return fmt.Sprintf("%s: %v is none of %v", at, value, all)
	}
	if types, ok := s["type"]; ok && !strings.Contains(fmt.Sprint(types), typeOf(value)) &&
		!(typeOf(value) == "integer" && strings.Contains(fmt.Sprint(types), "number")) {
		return fmt.Sprintf("%s: %v is no %v", at, value, types)
	}
	switch v := value.(type) {
	case string:
		if pattern, ok := s["pattern"].(string); ok && !regexp.MustCompile(pattern).MatchString(v) {
			return fmt.Sprintf("%s: %q does not match %s", at, v, pattern)
		}
	case map[string]any:
		return invalidObject(at, v, s)
	case []any:
		for i, item := range v {
			if problem := invalid(at+"["+strconv.Itoa(i)+"]", item, s["items"].(map[string]any)); problem != "" {
				return problem
			}
		}
	case float64:
		low, hasLow := s["minimum"].(float64)
		high, hasHigh := s["maximum"].(float64)
		if hasLow && v < low || hasHigh && v > high {
			return fmt.Sprintf("%s: %v is not from %v to %v", at, v, low, high)
		}
	}
	return ""
}

func invalidObject(at string, value, s map[string]any) string {
	properties := s["properties"].(map[string]any)
	for name, inner := range value {
		property, ok := properties[name]
		if !ok {
			return fmt.Sprintf("%s.%s: unknown field", at, name)
		}
		if problem := invalid(at+"."+name, inner, property.(map[string]any)); problem != "" {
			return problem
		}
	}
	required, _ := s["required"].([]any)
	for _, name := range required {
		if value[name.(string)] == nil {
			return fmt.Sprintf("%s.%s: required", at, name)
		}
	}
	return ""
}

func typeOf(value any) string {
	switch v := value.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case float64:
		if v == float64(int64(v)) {
			return "integer"
		}
		return "number"
	case []any:
		return "array"
	}
	return "object"
}
