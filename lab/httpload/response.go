// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

const (
	mostHead = 64 << 10 // the largest head of a response, in bytes
	mostBody = 1 << 20  // how many bytes of a body are kept, to check them
)

// response parses an HTTP/1.1 response (RFC 9112) piece by piece, as its bytes arrive.
type response struct {
	part   responsePart
	text   []byte // the incomplete head, or the incomplete line of the chunked coding
	left   int64  // bytes of the body, or of the chunk, that are still to come
	status int
	server string // the value of the header that names the server
	body   []byte // the beginning of the body; empty unless bodies are kept
	keeps  bool   // the server will keep the connection open after the response
}

// responsePart is the part of a response to which the next byte belongs.
type responsePart uint8

const (
	head        responsePart = iota
	sizedBody                // a body of known length
	unsizedBody              // a body that ends with the connection
	chunkSize                // the line with the size of a chunk
	chunk
	chunkEnd // the end of line after a chunk
	trailer  // the lines after the last chunk, up to an empty line
	complete // the response is complete
)

// headReader parses the heads of responses. All responses share one, because its buffer is large.
type headReader struct {
	bytes  bytes.Reader
	buffer *bufio.Reader
	server string // the name of the header that names the server
	keep   bool   // bodies are kept to check them
}

// newHeadReader returns a reader. server is the name of the header that names the server. keep
// tells whether bodies are kept.
func newHeadReader(server string, keep bool) *headReader {
	return &headReader{buffer: bufio.NewReaderSize(nil, mostHead), server: server, keep: keep}
}

// feed parses the next bytes of the response. It returns the bytes that follow the response.
func (r *response) feed(p []byte, heads *headReader) (rest []byte, err error) {
	for len(p) > 0 && r.part != complete && err == nil {
		switch r.part {
		case head:
			p, err = r.feedHead(p, heads)
		case sizedBody, chunk, unsizedBody:
			p = r.feedBody(p, heads.keep)
		default:
			p, err = r.feedLine(p)
		}
	}
	return p, err
}

// feedHead collects the head until the empty line at its end, and parses it. It returns the bytes
// after the head, or nothing if the head is not complete yet.
func (r *response) feedHead(p []byte, heads *headReader) (rest []byte, err error) {
	const emptyLine = "\r\n\r\n"
	before := len(r.text)
	r.text = append(r.text, p...)
	from := max(before-len(emptyLine)+1, 0) // the empty line may begin in the bytes before p
	index := bytes.Index(r.text[from:], []byte(emptyLine))
	if index < 0 {
		if len(r.text) > mostHead {
			return nil, fmt.Errorf("the head is longer than %d bytes", mostHead)
		}
		return nil, nil
	}
	length := from + index + len(emptyLine) // of the head, which ends in p
	if err := r.parseHead(r.text[:length], heads); err != nil {
		return nil, err
	}
	r.text = r.text[:0]
	return p[length-before:], nil
}

// parseHead parses a whole head. It stores what the report needs, and determines how the body ends
// (RFC 9112, section 6.3).
func (r *response) parseHead(text []byte, heads *headReader) error {
	heads.bytes.Reset(text)
	heads.buffer.Reset(&heads.bytes)
	parsed, err := http.ReadResponse(heads.buffer, nil)
	if err != nil {
		return fmt.Errorf("the head %.100q: %w", text, err)
	}
	r.status, r.server, r.keeps = parsed.StatusCode, parsed.Header.Get(heads.server), !parsed.Close
	switch {
	case parsed.StatusCode < 200: // an interim response; another response follows
		r.part = head
	case len(parsed.TransferEncoding) > 0:
		r.part = chunkSize
	case parsed.ContentLength == 0:
		r.part = complete
	case parsed.ContentLength > 0:
		r.part, r.left = sizedBody, parsed.ContentLength
	default: // the length is not known: the body ends with the connection, which cannot be kept
		r.part, r.keeps = unsizedBody, false
	}
	return nil
}

// feedBody counts bytes of a body or chunk, and stores them if bodies are kept. It returns the
// bytes after the body or chunk.
func (r *response) feedBody(p []byte, keep bool) (rest []byte) {
	n := len(p)
	if r.part != unsizedBody {
		n = int(min(int64(n), r.left))
		r.left -= int64(n)
	}
	if keep {
		r.body = append(r.body, p[:min(n, mostBody-len(r.body))]...)
	}
	if r.left == 0 && r.part == sizedBody {
		r.part = complete
	} else if r.left == 0 && r.part == chunk {
		r.part = chunkEnd
	}
	return p[n:]
}

// feedLine parses a line of the chunked coding: the size of a chunk, the end of line after a chunk,
// or a line of the trailer (RFC 9112, section 7.1). It returns the bytes after the line. If the end
// of the line has not arrived, it stores the beginning of the line, and returns nothing.
func (r *response) feedLine(p []byte) (rest []byte, err error) {
	before, rest, found := bytes.Cut(p, []byte("\n"))
	r.text = append(r.text, before...)
	if len(r.text) > mostHead {
		return nil, errors.New("a line of the chunked coding is too long")
	}
	if !found {
		return nil, nil
	}
	line := bytes.TrimSuffix(r.text, []byte("\r"))
	switch {
	case r.part == chunkSize:
		size, _, _ := bytes.Cut(line, []byte(";"))
		r.left, err = strconv.ParseInt(string(bytes.TrimSpace(size)), 16, 64)
		if err != nil || r.left < 0 {
			return nil, fmt.Errorf("the size of a chunk, %.100q, is not a hexadecimal number", size)
		}
		r.part = chunk
		if r.left == 0 { // the last chunk
			r.part = trailer
		}
	case r.part == chunkEnd && len(line) > 0:
		return nil, fmt.Errorf("a chunk is followed by %.100q instead of the end of the line", line)
	case r.part == chunkEnd:
		r.part = chunkSize
	case len(line) == 0: // the end of the trailer
		r.part = complete
	}
	r.text = r.text[:0]
	return rest, nil
}

// end is called when the connection ends. It returns whether the response is complete: a body
// without a known length ends with the connection.
func (r *response) end() bool {
	if r.part == unsizedBody {
		r.part = complete
	}
	return r.part == complete
}

// reset prepares for the next response on the connection. It keeps the memory of text.
func (r *response) reset() { *r = response{text: r.text[:0]} }
