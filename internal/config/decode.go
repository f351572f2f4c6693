// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// document decodes a file. It has the fields of the file with their lines, and the errors and
// warnings found so far. Each error names the path of its field, where the errors of the library's
// own decoder name only lines and types of Go.
type document struct {
	fields   map[string]place            // by path, without fields that are null or empty
	lacking  map[string]bool             // the paths of sections with a field that could not be decoded
	bounds   map[string]fieldpath.Bounds // by path, for fields with a range tag
	problems fieldpath.Errors
	warnings fieldpath.Errors
	isFile   bool                           // all lines are lines of the same file
	before   *decoded                       // services that were decoded before; nil: none
	servers  map[*yaml.Node]*desired.Server // servers that were decoded before, of the present service
	reused   map[string]bool                // the paths of services and servers that were reused
}

// place is where a document holds a value.
type place struct {
	line int
	text string // the scalar as written
	bad  bool   // it could not be decoded, and is reported already
}

// Decode reads the only YAML document in data into the struct that into points to. The fields of
// the struct must have types that the files of this package use. Fields that data does not have
// keep their values.
//
// Then Decode calls rules and collects the errors. The errors of the functions in further could be
// consequences of other errors, so Decode calls these functions only while there are no errors. If
// an error has no line, Decode finds the line by the path. It omits errors about a field if the
// field, or a part of it, could not be decoded. The error is of type fieldpath.Errors.
func Decode(data []byte, into any, rules func() fieldpath.Errors, further ...func() fieldpath.Errors) error {
	d := decode(data, into)
	d.check(rules)
	for _, rules := range further {
		if len(d.problems) == 0 {
			d.check(rules)
		}
	}
	return d.problems.OrNil()
}

// check adds the errors that rules returns.
func (d *document) check(rules func() fieldpath.Errors) {
	for _, broken := range rules() {
		if broken.Line > 0 {
			d.add(broken)
			continue
		}
		d.failf(broken.Path, "%s%s", broken.Problem, d.describe(broken.Other))
	}
}

// describe returns the service or server of a field and the field's line in parentheses, such as
// " (server web/s1, line 12)". If neither is known, or the path is empty, the text is empty.
func (d *document) describe(path string) string {
	if path == "" {
		return ""
	}
	var parts []string
	if i, rest := indexed(path, "services"); i >= 0 {
		service := fieldpath.Item("services", i)
		what, name := "service", d.fields[fieldpath.Child(service, "name")].text
		if j, _ := indexed(rest, "servers"); j >= 0 {
			server := fieldpath.Item(fieldpath.Child(service, "servers"), j)
			what, name = "server", name+"/"+d.fields[fieldpath.Child(server, "name")].text
		}
		parts = append(parts, what+" "+name)
	}
	for !d.has(path) && path != "" { // the file lacks a field with a default: take the line of its section
		path = fieldpath.Parent(path)
	}
	if line := d.fields[path].line; line > 0 && d.isFile {
		parts = append(parts, fmt.Sprintf("line %d", line))
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

// decode decodes the only YAML document in data, and checks no rules.
func decode(data []byte, into any) *document {
	root, problem := parse(data)
	if problem == nil {
		return decodeDocument(root, into)
	}
	d := newDocument()
	d.problems = append(d.problems, problem)
	d.fields[""] = place{bad: true}
	return d
}

// decodeDocument decodes a document that was parsed, and checks no rules.
func decodeDocument(root *yaml.Node, into any) *document {
	d := newDocument()
	d.root(root, into)
	return d
}

// root decodes the document of a node.
func (d *document) root(node *yaml.Node, into any) {
	d.isFile = node.Line > 0
	d.value("", node.Content[0], reflect.ValueOf(into).Elem())
}

func newDocument() *document {
	return &document{
		fields: make(map[string]place), lacking: make(map[string]bool),
		bounds: make(map[string]fieldpath.Bounds),
	}
}

// Document returns the only YAML document in data, within the bounds of bounds.go. Aliases are not
// expanded. The error is of type fieldpath.Errors.
func Document(data []byte) (*yaml.Node, error) {
	root, problem := parse(data)
	if problem != nil {
		return nil, fieldpath.Errors{problem}
	}
	return root, nil
}

// parse returns the only YAML document in data, or its first error. All YAML is read by this
// function.
func parse(data []byte) (*yaml.Node, *fieldpath.Error) {
	root, problem := loadNodes(data)
	if problem == nil {
		problem = checkBounds(root, len(data))
	}
	if problem != nil {
		return nil, problem
	}
	return root, nil
}

// syntaxError returns an error of YAML's reader in terms of the file.
func syntaxError(data []byte, err error) *fieldpath.Error {
	problem := fieldpath.Error{Problem: err.Error()}
	var load *yaml.LoadError
	if !errors.As(err, &load) {
		return &problem
	}
	problem.Line = load.Mark.Line
	switch message := strings.TrimPrefix(load.Message, "yaml: "); message {
	case "no documents in stream":
		problem.Problem = "the file is empty; it must hold one YAML document"
	case "expected single document, found multiple":
		problem.Line = secondDocument(data)
		problem.Problem = "a second YAML document begins here; the file must hold one"
	default:
		problem.Problem = describeSyntax(message, load)
		if line, mistake := findMistake(data, problem.Line); mistake != "" {
			problem.Line, problem.Problem = line, mistake
		}
	}
	return &problem
}

// has tells whether the file has a value for the field, valid or not.
func (d *document) has(path string) bool {
	_, ok := d.fields[path]
	return ok
}

// bad tells whether the field, or a section that contains it, could not be decoded.
func (d *document) bad(path string) bool {
	for {
		if d.fields[path].bad {
			return true
		}
		if path == "" {
			return false
		}
		path = fieldpath.Parent(path)
	}
}

// failf reports an error about a field. It does nothing if the field, or a part of it, could not be
// decoded, because that is reported already.
func (d *document) failf(path, format string, args ...any) {
	if d.bad(path) || d.lacking[path] {
		return
	}
	d.report(path, fmt.Sprintf(format, args...))
}

// warnf adds a warning about a field, which may be missing.
func (d *document) warnf(path, format string, args ...any) {
	d.warnings = append(d.warnings, d.at(path, fmt.Sprintf(format, args...)))
}

// badf reports that a field cannot be decoded.
func (d *document) badf(path, format string, args ...any) {
	d.report(path, fmt.Sprintf(format, args...))
	f := d.fields[path]
	f.bad = true
	d.fields[path] = f
	if section := fieldpath.Parent(path); section != "" {
		d.lacking[section] = true
	}
}

func (d *document) report(path, problem string) {
	d.add(d.at(path, problem))
}

// at returns an error with the line of the field or, if the field is missing, of its section. It
// never shows the value of the seed, which is a secret.
func (d *document) at(path, problem string) *fieldpath.Error {
	at := path
	for !d.has(at) && at != "" {
		at = fieldpath.Parent(at)
	}
	value := d.fields[path].text
	if path == desired.SeedField {
		value = ""
	}
	return &fieldpath.Error{Line: d.fields[at].line, Path: path, Value: value, Problem: problem}
}

func (d *document) reportAt(line int, path, value, problem string) {
	d.add(&fieldpath.Error{Line: line, Path: path, Value: value, Problem: problem})
}

// add notes an error, unless there are too many.
func (d *document) add(problem *fieldpath.Error) {
	if len(d.problems) < mostErrors {
		d.problems = append(d.problems, problem)
		if len(d.problems) == mostErrors {
			d.problems = append(d.problems, &fieldpath.Error{
				Line:    problem.Line,
				Problem: fmt.Sprintf("these are the first %d errors; the others are not listed", mostErrors),
			})
		}
	}
}

// Variant is a value that has one of several names. Each name can have fields of its own. The file
// has either the name alone, or a mapping of the name to its fields.
type Variant interface {
	// Choose returns a pointer to the struct for the fields of a name. For an invalid name, it returns
	// an error that lists the valid names.
	Choose(name string) (any, error)
}

// value decodes a node into a field, and reports errors. A null leaves the field as it is, and so
// does an empty text for an address.
func (d *document) value(path string, node *yaml.Node, into reflect.Value) {
	line := node.Line
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	if node.Kind == yaml.ScalarNode && (node.Tag == "!!null" || node.Value == "" && isAddress(into)) {
		return
	}
	d.fields[path] = place{line: line, text: node.Value}
	if address, ok := misreadAddress(node); ok {
		d.fields[path] = place{line: line, text: address}
		d.badf(path, "%s", needsQuotes)
		return
	}
	if v, ok := into.Addr().Interface().(Variant); ok {
		d.variant(path, node, v)
		return
	}
	switch {
	case into.Kind() == reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		d.value(path, node, into.Elem())
	case into.Kind() == reflect.Struct && !isAddress(into):
		d.mapping(path, node, into)
	case into.Kind() == reflect.Slice:
		d.list(path, node, into)
	case into.Kind() == reflect.Map:
		d.anyFields(path, node, into)
	case node.Kind != yaml.ScalarNode:
		d.badf(path, "must be a single value, not a list or a mapping")
	default:
		if problem := d.setScalar(path, node.Value, into); problem != "" {
			d.badf(path, "%s", problem)
		}
	}
}

// variant decodes a Variant.
func (d *document) variant(path string, node *yaml.Node, v Variant) {
	name := node
	if node.Kind == yaml.MappingNode && len(node.Content) == 2 {
		name = node.Content[0]
	}
	if name.Kind != yaml.ScalarNode {
		d.badf(path, "must be a name, or a mapping of one name to its fields")
		return
	}
	into, err := v.Choose(name.Value)
	if err != nil {
		d.fields[path] = place{line: name.Line, text: name.Value}
		d.badf(path, "%v", err)
		return
	}
	if name != node {
		d.value(fieldpath.Child(path, name.Value), node.Content[1], reflect.ValueOf(into).Elem())
	}
}

// isAddress tells whether a value is an IP address or prefix.
func isAddress(v reflect.Value) bool {
	switch v.Interface().(type) {
	case netip.Addr, netip.Prefix:
		return true
	}
	return false
}

// mapping decodes the fields of a struct. Their names are in the yaml tags. Fields of an embedded
// struct count as fields of the outer one.
func (d *document) mapping(path string, node *yaml.Node, into reflect.Value) {
	if node.Kind != yaml.MappingNode {
		d.badf(path, "must be a mapping of field names to values")
		return
	}
	known, fields := fieldsOfType(into.Type())
	absent := sync.OnceValue(func() []string { return missing(known, node) })
	seen := make(map[string]int) // the lines of the fields so far
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		f, ok := fields[key.Value]
		at := fieldpath.Child(path, key.Value)
		first, duplicate := seen[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			// The key is a list or a mapping. Before such a key, YAML has a question mark.
			d.reportAt(key.Line, fieldpath.Child(path, "?"), "", "a field name must be a plain word")
		case key.Tag == "!!merge":
			d.reportAt(key.Line, fieldpath.Child(path, fieldpath.Quote(key.Value)), "", noMergeKeys)
			d.fields[path] = place{line: d.fields[path].line, bad: true} // it lacks the merged fields
		case !ok:
			d.unknownField(path, key, absent(), known)
		case duplicate:
			d.reportAt(key.Line, at, "", fmt.Sprintf("given twice; first in line %d", first))
		default:
			seen[key.Value] = key.Line
			if tag, ok := f.Tag.Lookup("range"); ok {
				d.bounds[at] = fieldpath.ParseBounds(tag)
			}
			d.value(at, value, into.FieldByIndex(f.Index))
		}
	}
}

// unknownField reports a field that the mapping at a path cannot have. If the name is nearly that
// of a missing field, further errors about the missing field would be consequences, and are not
// reported.
func (d *document) unknownField(path string, key *yaml.Node, missing, known []string) {
	problem, meant := describeUnknown(key.Value, missing, known)
	d.reportAt(key.Line, fieldpath.Child(path, plain(key.Value)), "", problem)
	if meant != "" {
		d.fields[fieldpath.Child(path, meant)] = place{line: key.Line, bad: true}
		d.lacking[path] = true
	}
}

// missing returns the names that are not keys of a mapping.
func missing(names []string, mapping *yaml.Node) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return child(mapping, name) != nil })
}

// structFields are the fields of a struct by their names in files, and the names in their order.
type structFields struct {
	names  []string
	byName map[string]reflect.StructField
}

// fieldsOfTypes has the structFields of each reflect.Type that was decoded. A file can have
// thousands of servers, so they are found only once.
var fieldsOfTypes sync.Map

// fieldsOfType returns the names of a struct's fields in files, and the fields by these names.
func fieldsOfType(t reflect.Type) (names []string, byName map[string]reflect.StructField) {
	if known, ok := fieldsOfTypes.Load(t); ok {
		all := known.(structFields)
		return all.names, all.byName
	}
	byName = map[string]reflect.StructField{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "" || name == "-" {
			continue // not in the file, or an embedded struct
		}
		names = append(names, name)
		byName[name] = f
	}
	fieldsOfTypes.Store(t, structFields{names, byName})
	return names, byName
}

// plain returns a name for a path. It quotes a name that would make the path ambiguous.
func plain(name string) string {
	if fieldpath.IsPlain(name) {
		return name
	}
	return fieldpath.Quote(name)
}

// list decodes a list.
func (d *document) list(path string, node *yaml.Node, into reflect.Value) {
	if node.Kind != yaml.SequenceNode {
		d.badf(path, "must be a list")
		return
	}
	if len(node.Content) > mostElements {
		d.badf(path, "has %d elements; at most %d are read", len(node.Content), mostElements)
		return
	}
	if len(node.Content) == 0 {
		into.SetZero()
		return
	}
	into.Set(reflect.MakeSlice(into.Type(), len(node.Content), len(node.Content)))
	for i, element := range node.Content {
		at := fieldpath.Item(path, i)
		if d.before != nil && d.reuse(at, element, into.Index(i)) {
			continue
		}
		d.value(at, element, into.Index(i))
		if !d.has(at) {
			d.fields[at] = place{line: element.Line}
			d.badf(at, "empty list element")
		}
	}
}

// anyFields decodes fields of any names (desired.Fields).
func (d *document) anyFields(path string, node *yaml.Node, into reflect.Value) {
	if node.Kind != yaml.MappingNode {
		d.badf(path, "must be a mapping of field names to values")
		return
	}
	before := len(d.problems)
	d.checkTree(path, node)
	if isValid := len(d.problems) == before; isValid {
		into.Set(reflect.ValueOf(desired.Fields(treeOf(node).(map[string]any))))
	}
}

// setScalar parses a text into a field of one of the types that configurations use. If the text is
// not valid, it returns what it must be.
func (d *document) setScalar(path, text string, into reflect.Value) (problem string) {
	var err error
	switch v := into.Addr().Interface().(type) {
	case *netip.Addr:
		if *v, err = netip.ParseAddr(text); err != nil {
			return "must be an IP address"
		}
	case *netip.Prefix:
		if *v, err = netip.ParsePrefix(text); err != nil {
			return "must be a prefix such as fd00:5:0:1::/64"
		}
	case *time.Duration:
		if *v, err = time.ParseDuration(text); err != nil {
			return "must be a duration with a unit, such as 500ms, 30s or 2h"
		}
	case *desired.Port:
		if text == "all" {
			*v = desired.AllPorts
			return ""
		}
		number, err := parseUint(text, 16)
		if err != nil || number == 0 {
			return "must be a port from 1 to 65535, or all"
		}
		*v = desired.Port(number)
	default:
		return d.setBasic(path, text, into)
	}
	return ""
}

// setBasic parses a text into a field of a basic type of Go, as setScalar does. A string gets the
// text as written, so a name such as 1 or true needs no quotes.
func (d *document) setBasic(path, text string, into reflect.Value) (problem string) {
	limits, limited := d.bounds[path]
	switch {
	case into.Kind() == reflect.String:
		into.SetString(text)
	case into.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return "must be true or false"
		}
		into.SetBool(text == "true")
	case into.CanUint():
		if !limited {
			limits = fieldpath.Bounds{High: math.MaxUint64 >> (64 - into.Type().Bits())} // those of the type
		}
		number, err := parseUint(text, into.Type().Bits())
		if err != nil || !limits.ContainNumber(number) {
			return "must be a whole number " + limits.String()
		}
		into.SetUint(number)
	case into.CanInt():
		number, err := parseInt(text, into.Type().Bits())
		switch {
		case limited && (err != nil || !limits.Contain(reflect.ValueOf(number))):
			return "must be a whole number " + limits.String()
		case err != nil:
			return "must be a whole number"
		}
		into.SetInt(number)
	case into.CanFloat():
		number, err := strconv.ParseFloat(text, into.Type().Bits())
		if err != nil || math.IsNaN(number) || math.IsInf(number, 0) {
			return "must be a number"
		}
		into.SetFloat(number)
	default:
		panic(fmt.Sprintf("config: no way to read a %s", into.Type()))
	}
	return ""
}

// parseUint parses a decimal number, or one with the prefix 0x, 0o or 0b. Underscores may group
// digits. It refuses other numbers with a leading zero: they are octal in YAML 1.1 and decimal in
// YAML 1.2.
func parseUint(text string, bits int) (uint64, error) {
	if len(text) > 1 && text[0] == '0' && text[1] >= '0' && text[1] <= '9' {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseUint(text, 0, bits)
}

// parseInt parses a number as parseUint does, but the number may be negative. It accepts negative
// numbers even for fields that must not have them: the error then names the range of the field.
func parseInt(text string, bits int) (int64, error) {
	digits, negative := strings.CutPrefix(text, "-")
	number, err := parseUint(digits, bits-1)
	if negative {
		return -int64(number), err
	}
	return int64(number), err
}
