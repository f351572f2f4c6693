// SPDX-License-Identifier: Apache-2.0

package bench

import "fmt"

// Progress is told what a measurement does next, in a few words; nil: nobody is.
type Progress func(what string)

func (p Progress) say(format string, args ...any) {
	if p != nil {
		p(fmt.Sprintf(format, args...))
	}
}
