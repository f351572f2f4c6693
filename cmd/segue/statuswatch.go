// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/wording"
)

// watch shows a snapshot, and after each interval another one, with the rates since the last one.
// It returns nil when the context ends, because the user ends it by Ctrl-C.
func watch[S snapshot[S]](
	ctx context.Context, out io.Writer, o statusOptions, last S,
	read func() (S, error), show func(io.Writer, S) error,
) error {
	for {
		var status bytes.Buffer
		if !o.asJSON {
			fmt.Fprintf(&status, "%s, every %s\n", time.Now().UTC().Format(time.RFC3339), o.interval)
		}
		if err := show(&status, last); err != nil {
			return err
		}
		if err := refresh(out, status.String(), o.asJSON); err != nil {
			return err
		}
		now, err := later(ctx, o.interval, read)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		now.RatesSince(last)
		last = now
	}
}

// refresh shows a status. On a terminal, the status replaces the earlier one, unless it is JSON.
// Elsewhere it follows the earlier one.
func refresh(out io.Writer, status string, asJSON bool) error {
	const clear = "\x1b[H\x1b[2J" // moves the cursor to the first cell, and erases all
	var err error
	switch size := windowSize(out); {
	case asJSON:
		_, err = io.WriteString(out, status)
	case size == nil:
		_, err = io.WriteString(out, status+"\n")
	default:
		_, err = io.WriteString(out, clear+fit(status, int(size.Row), int(size.Col)))
	}
	return err
}

// windowSize returns the size of a terminal's window, or nil if out is not a terminal.
func windowSize(out io.Writer) *unix.Winsize {
	file, ok := out.(*os.File)
	if !ok {
		return nil
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return nil
	}
	return size
}

// fit cuts a text that does not fit into a window, and ends it with the number of missing lines.
// Long lines take several rows. The last row stays free for the cursor. If rows or columns are 0,
// the size is unknown, and fit cuts nothing.
func fit(text string, rows, columns int) string {
	lines := slices.Collect(strings.Lines(text))
	if rows == 0 || columns == 0 || shownLines(lines, rows-1, columns) == len(lines) {
		return text
	}
	shown := shownLines(lines, rows-2, columns)
	more := fmt.Sprintf("... %s: enlarge the window", wording.Count(len(lines)-shown, "more line"))
	return strings.Join(lines[:shown], "") + more[:min(len(more), columns)] + "\n"
}

// shownLines returns how many of the lines fit into the rows of the terminal.
func shownLines(lines []string, rows, columns int) int {
	for i, line := range lines {
		length := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
		takes := max(1, (length+columns-1)/columns) // length / columns, rounded up
		if rows -= takes; rows < 0 {
			return i
		}
	}
	return len(lines)
}
