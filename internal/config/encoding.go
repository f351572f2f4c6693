// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// checkEncoding returns an error if a file is not text in UTF-8. A byte order mark is allowed.
// Unlike the errors of YAML's reader, the error names the encoding and the line.
func checkEncoding(data []byte) *fieldpath.Error {
	at := func(i int, format string, args ...any) *fieldpath.Error {
		return &fieldpath.Error{Line: 1 + bytes.Count(data[:i], []byte("\n")), Problem: fmt.Sprintf(format, args...)}
	}
	if name := otherEncoding(data); name != "" {
		return at(0, "the file is %s; it must be UTF-8", name)
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return at(i, "the file is binary: it has a zero byte here; it must be text")
	}
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			return at(i, "the file is not UTF-8: it has the byte %#02x here", data[i])
		case r < ' ' && r != '\t' && r != '\n' && r != '\r':
			return at(i, "the file has the control character %U here; it must be text", r)
		}
		i += size
	}
	return nil
}

// otherEncoding returns the name of the encoding if a file seems to be in an encoding of Unicode
// other than UTF-8, and otherwise an empty text.
func otherEncoding(data []byte) string {
	begins := func(mark string) bool { return bytes.HasPrefix(data, []byte(mark)) }
	switch { // the byte order marks in both orders
	case begins("\xff\xfe\x00\x00"), begins("\x00\x00\xfe\xff"):
		return "UTF-32"
	case begins("\xff\xfe"), begins("\xfe\xff"):
		return "UTF-16"
	}
	if len(data) < 4 {
		return ""
	}
	// In UTF-16, one of the two bytes of an ASCII character is zero: always the first, or always the
	// second.
	isZero := [4]bool{data[0] == 0, data[1] == 0, data[2] == 0, data[3] == 0}
	if isZero[0] != isZero[1] && isZero[2] == isZero[0] && isZero[3] == isZero[1] {
		return "UTF-16"
	}
	return ""
}

// secondDocument returns the line at which the second document of a text begins. The mark "---"
// begins a document, and "..." ends one.
func secondDocument(data []byte) int {
	began, ended := false, false // whether the first document has
	number := 0
	for line := range bytes.Lines(data) {
		number++
		content := bytes.TrimSpace(line)
		switch {
		case isMark(line, "---"):
			if began {
				return number
			}
			began = true
		case isMark(line, "..."):
			ended = began
		case len(content) == 0 || content[0] == '#': // an empty line or a comment
		case content[0] == '%' && (!began || ended): // a directive, which is outside of documents
		case ended:
			return number
		default:
			began = true
		}
	}
	return number
}

// isMark tells whether a line is a mark that begins or ends a document.
func isMark(line []byte, mark string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(mark))
	return ok && (len(rest) == 0 || isSpace(rest[0]))
}
