// SPDX-License-Identifier: Apache-2.0

// Package fieldpath names the fields of structured input, such as a configuration file, and
// describes errors in them. A field's path is written as services[2].servers[0].locator.
package fieldpath

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Error is one error in a field.
type Error struct {
	File    string // empty if the input was not read from a file
	Line    int    // from 1; 0 if the error has no place in a file
	Path    string // of the field, such as services[2].servers[0].locator; empty for the whole input
	Value   string // as written in the input; empty if there is none
	Problem string
	Other   string // path of another field, with which the text of the problem ends; empty: none
}

// Error returns the error on one line, as FILE:LINE: PATH "VALUE": PROBLEM. It leaves out parts
// that are empty.
func (e *Error) Error() string {
	var s strings.Builder
	line := strconv.Itoa(e.Line)
	switch {
	case e.File != "" && e.Line > 0:
		s.WriteString(e.File + ":" + line + ": ")
	case e.File != "":
		s.WriteString(e.File + ": ")
	case e.Line > 0:
		s.WriteString("line " + line + ": ")
	}
	if e.Path != "" {
		s.WriteString(e.Path)
		if e.Value != "" {
			s.WriteString(" " + Quote(e.Value))
		}
		s.WriteString(": ")
	}
	s.WriteString(e.Problem)
	return s.String()
}

// Quote quotes a value. It escapes line breaks, and shortens long values.
func Quote(value string) string {
	const longest = 80
	if runes := []rune(value); len(runes) > longest {
		return strconv.Quote(string(runes[:longest])) + "..."
	}
	return strconv.Quote(value)
}

// Errors are all errors in one input.
type Errors []*Error

// Addf adds an error about the field at a path.
func (e *Errors) Addf(path, format string, args ...any) {
	*e = append(*e, &Error{Path: path, Problem: fmt.Sprintf(format, args...)})
}

// Error returns one line per error.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, problem := range e {
		lines[i] = problem.Error()
	}
	return strings.Join(lines, "\n")
}

// In sets the file of the errors that have none, and returns all errors.
func (e Errors) In(file string) Errors {
	for _, problem := range e {
		if problem.File == "" {
			problem.File = file
		}
	}
	return e
}

// AtLine returns copies of the errors with another line.
func (e Errors) AtLine(line int) Errors {
	copies := make(Errors, len(e))
	for i, problem := range e {
		other := *problem
		other.Line = line
		copies[i] = &other
	}
	return copies
}

// Unwrap returns the single errors, for errors.As and errors.Is.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, problem := range e {
		errs[i] = problem
	}
	return errs
}

// OrNil returns the errors in the order of the file's lines. If there are none, it returns nil: a
// nil Errors in an error would not be nil.
func (e Errors) OrNil() error {
	if len(e) == 0 {
		return nil
	}
	return e.Sorted()
}

// Sorted sorts the errors by the file's lines, and returns them.
func (e Errors) Sorted() Errors {
	slices.SortStableFunc(e, func(a, b *Error) int { return cmp.Compare(a.Line, b.Line) })
	return e
}
