// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"slices"
	"sort"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// withStoredOverrides returns the files with the overrides in the file of overrides. It leaves out
// those that are invalid: a change of the configuration file, or a newer build, can make them so, and
// a host must start nevertheless.
func (f *Files[D]) withStoredOverrides() (*Files[D], field.Errors) {
	overrides, stored, err := readOverrides(f.place)
	if err != nil {
		changed := *f
		changed.Invalid = []desired.InvalidOverride{{Problems: asProblems(err, f.place)}}
		return &changed, f.warnings
	}
	changed, warnings, invalid := f.withValid(overrides)
	changed.Stored, changed.Invalid = stored, invalid
	return changed, append(f.warnings, warnings...)
}

// asProblems returns an error about a file as errors that name the file.
func asProblems(err error, file string) field.Errors {
	var problems field.Errors
	if !errors.As(err, &problems) {
		problems.Addf("", "%s", err)
	}
	return problems.In(file)
}

// withValid returns the files with as many overrides as are valid together. Most errors are in a field
// that an override sets. Otherwise it leaves out the first override with which the errors begin.
func (f *Files[D]) withValid(
	overrides []desired.Override,
) (changed *Files[D], warnings field.Errors, invalid []desired.InvalidOverride) {
	valid := slices.Clone(overrides)
	for {
		changed, warnings, err := f.WithOverrides(valid)
		if err == nil {
			slices.SortStableFunc(invalid, func(a, b desired.InvalidOverride) int {
				return cmp.Compare(a.Line, b.Line)
			})
			return changed, warnings, invalid
		}
		wrong := f.culprits(valid)
		if len(wrong) == 0 {
			first := sort.Search(len(valid), func(i int) bool {
				_, _, err := f.WithOverrides(valid[:i+1])
				return err != nil
			})
			_, _, err := f.WithOverrides(valid[:first+1])
			wrong = map[int]field.Errors{first: asProblems(err, f.place)}
		}
		var others []desired.Override
		for i, o := range valid {
			if problems := wrong[i]; problems != nil {
				invalid = append(invalid, desired.InvalidOverride{Override: o, Problems: problems})
			} else {
				others = append(others, o)
			}
		}
		valid = others
	}
}

// culprits returns the errors of the overrides that set a field with an error, by their indexes.
func (f *Files[D]) culprits(overrides []desired.Override) map[int]field.Errors {
	wrong := map[int]field.Errors{}
	for i := range overrides {
		if problem := f.refuseServer(&overrides[i]); problem != nil {
			wrong[i] = field.Errors{problem}.In(f.place)
		}
	}
	if len(wrong) > 0 {
		return wrong
	}
	merged, m := merge(f.root, overrides)
	_, _, problems := f.read(merged)
	services := servicesOf(merged)
	for _, problem := range problems {
		if at := m.placeOf(problem.Path, services); at.override >= 0 && at.isSetBy(&overrides[at.override]) {
			one := field.Errors{m.translatedOne(problem, services)}.In(f.place)
			wrong[at.override] = append(wrong[at.override], one...)
		}
	}
	return wrong
}

// servicesOf returns the services of a document.
func servicesOf(root *yaml.Node) []*yaml.Node {
	return elements(child(resolved(root.Content[0]), "services"))
}

// isSetBy tells whether an override gives the field at a place its value.
func (p *mergedPlace) isSetBy(o *desired.Override) bool {
	if o.Target() != p.target.Target() {
		return false
	}
	name, _, _ := strings.Cut(p.rest, ".")
	name, _, _ = strings.Cut(name, "[")
	_, sets := o.Set[name]
	return sets || o.Add != nil
}
