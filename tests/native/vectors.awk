# Reads `objdump -d` of all objects: a kernel of an instruction set must use its widest registers, else the compiler did not
# take the set, or did not vectorise the loop. No instruction set divides integers; of 64 bits, NEON multiplies none and AVX2
# converts none to double, as the means of 32-bit integers need; dequantise_d may leave its loops to what it calls. The
# baseline of x86-64 is not checked: scalars are in the same registers.
BEGIN {
	registers["avx2"] = "%ymm"
	registers["avx512"] = "%zmm"
	registers["neon"] = "v[0-9]+[.](16b|8h|4s|2d)"
}

/file format .*aarch64/ { neon = 1 }

/^[0-9a-f]+ <.*>:$/ {
	name = substr($2, 2, length($2) - 3)
	set = ""
	if (match(name, /_(avx2|avx512|baseline)([.].*)?$/)) {
		set = substr(name, RSTART + 1)
		sub(/[.].*/, "", set)
	}
	kernels += set != ""
	if (set == "baseline")
		set = neon && name !~ /^(prod_[iu]64|mean_i32)/ ? "neon" : ""
	if (name ~ /^(divide_[iu]|mean_[iu]32_avx2|dequantise_d_)|[.]cold/)
		set = ""
	if (set)
		scalar[name] = 1
	next
}

set && $0 ~ registers[set] { delete scalar[name] }

END {
	for (name in scalar) {
		print "no vector code: " name
		failed = 1
	}
	if (kernels < 60) {
		print "only " kernels " kernels"
		failed = 1
	}
	exit failed
}
