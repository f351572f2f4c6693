// SPDX-License-Identifier: Apache-2.0

package application

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Schedule is a list of changes of the share of the cores that co-located work takes, in ascending
// order of times. Before the first change the share is 0.
type Schedule []Change

// Change sets the share of the cores that co-located work takes from a time on.
type Change struct {
	At    time.Duration // since the start of the schedule; 0 or more
	Share float64       // from 0 to less than 1
}

// String returns the schedule in the form that ParseSchedule reads.
func (s Schedule) String() string {
	var items []string
	for _, c := range s {
		share := strconv.FormatFloat(100*c.Share, 'g', 12, 64)
		items = append(items, fmt.Sprintf("%s%%@%v", share, c.At))
	}
	return strings.Join(items, ",")
}

// scheduleForm describes an item of a schedule, for errors.
const scheduleForm = `must be SHARE@TIME, with a share from 0% to less than 100%, such as 50%@60s`

// ParseSchedule reads a schedule such as "50%@60s,0%@2m", whose times must ascend. An empty text is
// an empty schedule.
func ParseSchedule(text string) (Schedule, error) {
	var schedule Schedule
	if text == "" {
		return nil, nil
	}
	for item := range strings.SplitSeq(text, ",") {
		share, at, _ := strings.Cut(item, "@")
		number, isPercent := strings.CutSuffix(share, "%")
		percent, err := strconv.ParseFloat(number, 64)
		if err != nil || !isPercent || !(percent >= 0 && percent < 100) {
			return nil, fmt.Errorf("%q: %s", item, scheduleForm)
		}
		after, err := time.ParseDuration(at)
		if err != nil || after < 0 {
			return nil, fmt.Errorf("%q: %s", item, scheduleForm)
		}
		if n := len(schedule); n > 0 && after <= schedule[n-1].At {
			return nil, fmt.Errorf("%q: the time must be after %v, the time before it", item,
				schedule[n-1].At)
		}
		schedule = append(schedule, Change{At: after, Share: percent / 100})
	}
	return schedule, nil
}
