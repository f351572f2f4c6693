// SPDX-License-Identifier: Apache-2.0

package load

import "time"

// limit is the time to wait for operations that take next to no time, unless the machine stands
// still.
const limit = time.Minute
