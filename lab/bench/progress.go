// SPDX-License-Identifier: Apache-2.0

package bench

import "fmt"

// Progress is called with a short description of each step of a measurement. It may be nil.
type Progress func(what string)

// say formats a description and calls p, unless p is nil.
func (p Progress) say(format string, args ...any) {
	if p != nil {
		p(fmt.Sprintf(format, args...))
	}
}
